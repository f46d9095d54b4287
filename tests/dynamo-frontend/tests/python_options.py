# SPDX-License-Identifier: Apache-2.0
"""Prints the options of Dynamo's Python frontend: spellings, variable, default, choices.

python python_options.py > python-options-1.6.1.tsv   (with ai-dynamo 1.6.1, no DYN_* set)
"""

import argparse
import re

from dynamo.frontend.frontend_args import FrontendArgGroup

parser = argparse.ArgumentParser(add_help=False)
FrontendArgGroup().add_arguments(parser)
for action in parser._actions:
    hidden = action.help is argparse.SUPPRESS or action.help is None
    variable = None if hidden else re.search(r"env var: (\w+)", action.help)
    default = action.default
    if default in (None, [], argparse.SUPPRESS):
        default = ""
    elif isinstance(default, bool):
        default = str(default).lower()
    print(
        ",".join(action.option_strings),
        variable.group(1) if variable else "",
        default,
        ",".join(action.choices or ()),
        sep="\t",
    )
