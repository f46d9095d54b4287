# SPDX-License-Identifier: Apache-2.0
"""Make requirements.lock, tools.lock, pytest.lock and sglang.lock again.

    python lock.py [--upgrade]

uv resolves; this script keeps the hashes of the wheels that fit the platform (uv's own lock in
requirements.txt form names every file of a release) and drops the packages of excludes.txt. Without
`--upgrade`, versions that are locked already stay.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
PYTHON: Final = "3.11"
PLATFORM: Final = "x86_64-manylinux_2_35"
"""llguidance, which vLLM needs, has no wheel for a glibc before 2.31; 2.35 is Ubuntu 22.04."""


def names(path: Path) -> frozenset[str]:
    """Return the package names of a file with one name a line and `#` for remarks."""
    lines = (
        line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()
    )
    return frozenset(line for line in lines if line)


def resolve(source: Path, options: list[str]) -> list[dict[str, Any]]:
    """Let uv resolve `source` and return the packages of its pylock.toml."""
    with tempfile.TemporaryDirectory() as directory:
        pylock = Path(directory) / "pylock.toml"
        command = [
            os.environ.get("UV", "uv"), "pip", "compile", str(source),
            "--python-version", PYTHON, "--python-platform", PLATFORM,
            "--only-binary", ":all:", "--format", "pylock.toml", "--quiet",
            "--output-file", str(pylock), *options,
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        packages: list[dict[str, Any]] = tomllib.loads(pylock.read_text(encoding="utf-8"))[
            "packages"
        ]
    return packages


def render(packages: list[dict[str, Any]], left_out: frozenset[str]) -> str:
    """Return the lock: one line a package, with the hashes of its wheels that fit.

    Raises:
        ValueError: if a name of `left_out` was not resolved, hence need not be there.
    """
    found = {package["name"] for package in packages}
    if unknown := left_out - found:
        raise ValueError(f"excludes.txt names packages that nothing asks for: {sorted(unknown)}")
    lines = []
    for package in sorted(packages, key=lambda each: str(each["name"])):
        if package["name"] in left_out:
            continue
        hashes = sorted(wheel["hashes"]["sha256"] for wheel in package["wheels"])
        lines.append(
            f"{package['name']}=={package['version']} "
            + " ".join(f"--hash=sha256:{each}" for each in hashes)
        )
    return "\n".join(lines) + "\n"


def pins(lock: Path) -> str:
    """Return the versions of a lock, to be kept, as a constraints file."""
    if not lock.exists():
        return ""
    return (
        "\n".join(re.findall(r"^\S+==\S+", lock.read_text(encoding="utf-8"), re.MULTILINE)) + "\n"
    )


def write(name: str, extra: list[str], left_out: frozenset[str], *, upgrade: bool) -> None:
    """Write one lock from its `.in` file."""
    lock = HERE / f"{name}.lock"
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as kept:
        kept.write("" if upgrade else pins(lock))
        kept.flush()
        packages = resolve(HERE / f"{name}.in", [*extra, "--constraints", kept.name])
    text = render(packages, left_out)
    lock.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{lock.name}: {text.count(chr(10))} packages\n")


def main() -> None:
    """Write the locks; mypy checks against the engines' NumPy and safetensors."""
    parser = argparse.ArgumentParser(description="Make the locks of tests/engines again.")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    upgrade: bool = parser.parse_args().upgrade
    overrides = ["--override", str(HERE / "overrides.txt")]
    write("requirements", overrides, names(HERE / "excludes.txt"), upgrade=upgrade)
    shared = ["--constraints", str(HERE / "requirements.lock"), *overrides]
    for name in ("tools", "pytest"):
        write(name, shared, frozenset(), upgrade=upgrade)
    write("sglang", ["--no-deps"], frozenset(), upgrade=upgrade)


if __name__ == "__main__":
    main()
