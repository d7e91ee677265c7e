"""Set up an environment of its own and run every check and test in it.

    python3 scripts/run_tests.py [--torch-index URL] [--venv FOLDER] [--only CHECK ...] [-- options of pytest]

Needs Python 3.10 or newer with venv, a C++20 compiler and a package index; says so if one is missing.
"""
# No syntax newer than Python 3.6 in this file: an old Python has to get as far as the message below.

import sys

if sys.version_info < (3, 10):  # noqa: UP036 - the point is to tell an old Python
    sys.exit("zero-plugin needs Python 3.10 or newer, this is {}.{}".format(*sys.version_info))


def main() -> int:
    """Run the checks; returns 0 if all passed."""
    import argparse
    from pathlib import Path

    import checks
    import environment

    parser = argparse.ArgumentParser(
        description="Set up an environment and run the checks and tests."
    )
    parser.add_argument("--torch-index", metavar="URL", help="package index to take torch from")
    parser.add_argument(
        "--venv",
        type=Path,
        default=environment.REPOSITORY / ".venv-tests",
        help="folder for the environment; made if absent",
    )
    parser.add_argument("--only", nargs="+", choices=checks.NAMES, help="only these (default: all)")
    parser.add_argument("pytest", nargs="*", help="after --: options and paths for pytest")
    options = parser.parse_args()

    recipe = environment.Recipe(
        folder=options.venv.absolute(),
        extras=("dev", "examples", "accelerate"),
        editable=True,
        torch_index=options.torch_index,
    )
    try:
        environment.prepare(recipe)
    except environment.SetupError as error:
        print(f"zero-plugin: {error}", file=sys.stderr)
        return 1
    return checks.run_all(recipe, only=options.only or checks.NAMES, pytest_options=options.pytest)


if __name__ == "__main__":
    sys.exit(main())
