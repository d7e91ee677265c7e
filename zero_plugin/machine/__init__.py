"""What this machine can do: looked at (`doctor`) and measured (`bench`)."""
