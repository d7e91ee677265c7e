"""The NVMe tier: files of fixed size that lanes read and write."""
