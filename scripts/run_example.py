"""Set up an environment of its own and run the fine-tuning example in it.

    python3 scripts/run_example.py [--torch-index URL] [--venv FOLDER] [options of examples/finetune_minilm.py]

Needs Python 3.10 or newer with venv, a C++20 compiler and a package index; says so if one is missing.
"""
# No syntax newer than Python 3.6 in this file: an old Python has to get as far as the message below.

import sys

if sys.version_info < (3, 10):  # noqa: UP036 - the point is to tell an old Python
    sys.exit("zero-plugin needs Python 3.10 or newer, this is {}.{}".format(*sys.version_info))


def main() -> int:
    """Run the example; returns its exit code."""
    import argparse
    from pathlib import Path

    import environment

    parser = argparse.ArgumentParser(
        description="Set up an environment and run examples/finetune_minilm.py in it.",
        epilog="All other options go to the example; --example-help lists them.",
    )
    parser.add_argument("--torch-index", metavar="URL", help="package index to take torch from")
    parser.add_argument(
        "--venv",
        type=Path,
        default=environment.REPOSITORY / ".venv-example",
        help="folder for the environment; made if absent",
    )
    parser.add_argument("--example-help", action="store_true", help="show the example's options")
    options, rest = parser.parse_known_args()

    recipe = environment.Recipe(
        folder=options.venv.absolute(),
        extras=("examples",),
        editable=False,
        torch_index=options.torch_index,
    )
    try:
        environment.prepare(recipe)
    except environment.SetupError as error:
        print(f"zero-plugin: {error}", file=sys.stderr)
        return 1
    if options.example_help:
        rest = ["--help"]
    return environment.run([str(recipe.python), "examples/finetune_minilm.py", *rest])


if __name__ == "__main__":
    sys.exit(main())
