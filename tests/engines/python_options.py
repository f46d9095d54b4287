# SPDX-License-Identifier: Apache-2.0
"""Print the options of Dynamo's Python frontend: spellings, variable, default, choices.

    python python_options.py > ../dynamo-frontend/tests/python-options-1.6.1.tsv

with ai-dynamo 1.6.1 and no DYN_* variable set. The frontend of this repository is compared with it.
"""

import argparse
import re

from dynamo.frontend.frontend_args import FrontendArgGroup


def line(action: argparse.Action) -> str:
    """Return the tab-separated line of one option."""
    shown = action.help if action.help is not argparse.SUPPRESS else None
    variable = re.search(r"env var: (\w+)", shown or "")
    default = action.default
    if default in (None, [], argparse.SUPPRESS):
        default = ""
    elif isinstance(default, bool):
        default = str(default).lower()
    fields = (
        ",".join(action.option_strings),
        variable.group(1) if variable else "",
        str(default),
        ",".join(action.choices or ()),
    )
    return "\t".join(fields)


def main() -> None:
    """Print a line for each option."""
    parser = argparse.ArgumentParser(add_help=False)
    FrontendArgGroup().add_arguments(parser)
    # argparse has no public way to its options.
    for action in parser._actions:  # noqa: SLF001
        print(line(action))


if __name__ == "__main__":
    main()
