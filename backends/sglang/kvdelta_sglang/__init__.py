# SPDX-License-Identifier: Apache-2.0
"""Claims about a decode worker's cache, settled in SGLang."""
