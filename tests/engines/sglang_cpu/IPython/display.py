# SPDX-License-Identifier: Apache-2.0
"""The names that `sglang.utils` imports."""

HTML = display = None
