# SPDX-License-Identifier: Apache-2.0
"""vLLM's NIXL connectors with delta transfer: the prefill worker skips and releases what the decode worker holds."""
