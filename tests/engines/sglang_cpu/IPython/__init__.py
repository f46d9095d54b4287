# SPDX-License-Identifier: Apache-2.0
"""In the place of IPython, which SGLang imports for notebooks alone."""
