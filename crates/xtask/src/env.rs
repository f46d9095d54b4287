// SPDX-License-Identifier: Apache-2.0

//! The Python environments, the tools and the test model, all in the cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

use crate::cache::{Cache, Key, project_root, sha256};
use crate::command;
use crate::progress::say;
use crate::upstream::copy_python;
use crate::wheel;
use crate::workers;

/// The lock files hold wheels of this Python alone.
const PYTHON_VERSION: &str = "3.11";
const PYTHON_VARIABLE: &str = "KVDELTA_PYTHON";

/// Runs `cargo xtask env`.
pub(crate) fn run(cache: &Cache) -> Result<ExitCode> {
    let engines = engines(cache)?;
    let model = model(cache, &engines)?;
    println!("engines  {}", engines.display());
    println!("model    {}", model.display());
    println!("protoc   {}", protoc(cache)?.display());
    let kvdelta = std::env::join_paths(wheel::overlay(cache)?)?;
    println!("kvdelta  {}", kvdelta.display());
    let sglang = std::env::join_paths(sglang(cache)?)?;
    println!("sglang   {}", sglang.display());
    match workers::overlay(cache, &engines)? {
        Some(overlay) => println!("workers  {}", overlay.display()),
        None => say(workers::NONE),
    }
    Ok(ExitCode::SUCCESS)
}

/// The folder of the Python files and lock files of the engine tests.
pub(crate) fn engines_folder() -> PathBuf {
    project_root().join("tests/engines")
}

/// The Python of the environment with vLLM, NIXL and Dynamo.
pub(crate) fn engines(cache: &Cache) -> Result<PathBuf> {
    let uv = tools(cache)?;
    let lock = engines_folder().join("requirements.lock");
    environment(cache, "python-engines", &lock, |python, lock| {
        // pip unpacks one package after the other; uv is much faster and reads the same lock.
        let mut install = uv_install(cache, &uv, python, lock)?;
        // Every worker imports thousands of files.
        install.arg("--compile-bytecode");
        Ok(install)
    })
}

/// uv's installation of what a lock file names, for `python`; `uv` is the Python that has it.
fn uv_install(cache: &Cache, uv: &Path, python: &Path, lock: &Path) -> Result<Command> {
    let mut install = Command::new(uv);
    install
        .args([
            "-m",
            "uv",
            "pip",
            "install",
            "--no-deps",
            "--require-hashes",
        ])
        .arg("--python")
        .arg(python)
        .arg("-r")
        .arg(lock)
        .env("UV_CACHE_DIR", cache.folder("uv")?);
    Ok(install)
}

/// The Python of the environment with uv, libclang, ruff and mypy.
pub(crate) fn tools(cache: &Cache) -> Result<PathBuf> {
    let lock = engines_folder().join("tools.lock");
    environment(cache, "python-tools", &lock, |python, lock| {
        let mut install = Command::new(python);
        install
            .args([
                "-m",
                "pip",
                "install",
                "--no-deps",
                "--require-hashes",
                "-r",
            ])
            .arg(lock);
        Ok(install)
    })
}

/// The folder of pytest and what it needs, to go before the engines' packages in PYTHONPATH.
pub(crate) fn pytest(cache: &Cache) -> Result<PathBuf> {
    beside_engines(cache, "pytest")
}

/// What goes before the engines' packages in PYTHONPATH for SGLang on a CPU: what stands in for parts of a GPU, and
/// the packages.
pub(crate) fn sglang(cache: &Cache) -> Result<[PathBuf; 2]> {
    let stand_ins = engines_folder().join("sglang_cpu");
    Ok([stand_ins, beside_engines(cache, "sglang")?])
}

/// A folder with what the lock file of this name holds.
fn beside_engines(cache: &Cache, name: &str) -> Result<PathBuf> {
    let uv = tools(cache)?;
    let lock = engines_folder().join(format!("{name}.lock"));
    let entry = format!("python-{name}");
    cache.entry(&entry, &Key::new().file(&lock)?, |folder| {
        let mut install = uv_install(cache, &uv, &uv, &lock)?;
        install
            .arg("--compile-bytecode")
            .arg("--target")
            .arg(folder);
        let log = cache.folder("logs")?.join(format!("{entry}.log"));
        command::logged(name, install, &log)
    })
}

/// A folder with the Python files of a wheel. It is fetched, or taken from uv's cache, as the engines' packages
/// are: uv refuses one whose checksum is not `sha256`.
pub(crate) fn wheel(cache: &Cache, name: &str, version: &str, sha256: &str) -> Result<PathBuf> {
    let requirement = format!("{name}=={version} --hash=sha256:{sha256}\n");
    let key = Key::new().part("requirement", requirement.as_bytes());
    cache.entry(&format!("wheel-{name}"), &key, |folder| {
        let scratch = tempfile::tempdir()?;
        let (lock, unpacked) = (scratch.path().join("lock"), scratch.path().join("unpacked"));
        fs::write(&lock, &requirement)?;
        let python = tools(cache)?;
        let mut install = uv_install(cache, &python, &python, &lock)?;
        install
            .args(["--no-build", "--link-mode", "copy", "--target"])
            .arg(&unpacked);
        let log = cache.folder("logs")?.join(format!("wheel-{name}.log"));
        command::logged(&format!("{name} {version}"), install, &log)?;
        copy_python(&unpacked, folder)
    })
}

/// The folder of the libclang that bindgen loads in builds of Dynamo's crates.
pub(crate) fn libclang(cache: &Cache) -> Result<PathBuf> {
    let mut ask = Command::new(tools(cache)?);
    ask.args([
        "-c",
        "import clang, os; print(os.path.join(os.path.dirname(clang.__file__), 'native'))",
    ]);
    Ok(PathBuf::from(command::output(ask)?.trim()))
}

/// The folder of the test model, made by `tests/engines/make_model.py`.
pub(crate) fn model(cache: &Cache, engines: &Path) -> Result<PathBuf> {
    let script = engines_folder().join("make_model.py");
    let key = Key::new()
        .file(&script)?
        .file(&engines_folder().join("requirements.lock"))?;
    cache.entry("test-model", &key, |folder| {
        let mut make = Command::new(engines);
        make.arg(&script).arg(folder);
        let log = tempfile::NamedTempFile::new()?;
        command::logged("test model", make, log.path())
    })
}

/// The protocol buffer compiler that builds of Dynamo's crates need.
pub(crate) fn protoc(cache: &Cache) -> Result<PathBuf> {
    let vendored = protoc_bin_vendored::protoc_bin_path()
        .context("the protoc of the crate protoc-bin-vendored does not fit this machine")?;
    let folder = cache.entry("protoc", &Key::new().file(&vendored)?, |folder| {
        fs::copy(&vendored, folder.join("protoc"))
            .with_context(|| format!("cannot copy {}", vendored.display()))?;
        Ok(())
    })?;
    Ok(folder.join("protoc"))
}

/// The NATS server: that in PATH, else Debian's package, unpacked into the cache.
pub(crate) fn nats_server(cache: &Cache) -> Result<PathBuf> {
    let mut installed = Command::new("nats-server");
    installed.arg("--version");
    if command::output(installed).is_ok() {
        return Ok(PathBuf::from("nats-server"));
    }
    let show = || {
        let mut show = Command::new("apt-cache");
        show.args(["show", "--no-all-versions", "nats-server"]);
        command::output(show)
    };
    // A new machine has no list of packages yet.
    let record = show().or_else(|_| {
        let mut update = Command::new("apt-get");
        update.args(["update", "--quiet"]);
        let log = cache.folder("logs")?.join("apt-get-update.log");
        command::logged("nats-server: list of packages", update, &log)?;
        show()
    });
    let record = record.context(
        "no nats-server in PATH and no Debian package of it: install NATS, or run apt-get update \
         as root",
    )?;
    let field = |name: &str| {
        let mut lines = record.lines();
        let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        value.with_context(|| format!("apt-cache show nats-server has no {name}"))
    };
    let (version, checksum) = (field("Version")?, field("SHA256")?);
    let key = Key::new()
        .part("version", version.as_bytes())
        .part("sha256", checksum.as_bytes());
    let folder = cache.entry("nats-server", &key, |folder| {
        let log = cache.folder("logs")?.join("nats-server.log");
        let mut download = Command::new("apt-get");
        download
            .args(["download", "--quiet"])
            .arg(format!("nats-server={version}"))
            .current_dir(folder);
        command::logged("nats-server: package", download, &log)?;
        let package = only_package(folder)?;
        let bytes =
            fs::read(&package).with_context(|| format!("cannot read {}", package.display()))?;
        if sha256(&bytes) != checksum {
            bail!("{} does not have its SHA-256", package.display());
        }
        let mut unpack = Command::new("dpkg-deb");
        unpack.arg("--extract").arg(&package).arg(folder);
        command::quiet(unpack, &log)?;
        fs::remove_file(&package)?;
        Ok(())
    })?;
    ["usr/sbin/nats-server", "usr/bin/nats-server"]
        .iter()
        .map(|path| folder.join(path))
        .find(|path| path.exists())
        .with_context(|| format!("no nats-server in {}", folder.display()))
}

fn only_package(folder: &Path) -> Result<PathBuf> {
    let entries =
        fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut packages = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|end| end == "deb"));
    packages.next().context("apt-get downloaded no package")
}

/// A virtual environment from a lock file, which holds versions and hashes of all it contains.
/// `install` gives the command that installs the lock into the environment of a Python.
fn environment(
    cache: &Cache,
    name: &str,
    lock: &Path,
    install: impl FnOnce(&Path, &Path) -> Result<Command>,
) -> Result<PathBuf> {
    let base = base_python()?;
    let key = Key::new()
        .file(lock)?
        .part("python", base.version.as_bytes());
    let folder = cache.entry(name, &key, |folder| {
        let log = cache.folder("logs")?.join(format!("{name}.log"));
        let mut venv = Command::new(&base.path);
        venv.args(["-m", "venv"]).arg(folder);
        command::logged(&format!("{name}: virtual environment"), venv, &log)?;
        let install = install(&folder.join("bin/python"), lock)?;
        command::logged(&format!("{name}: packages"), install, &log)
    })?;
    Ok(folder.join("bin/python"))
}

struct BasePython {
    path: PathBuf,
    version: String,
}

fn base_python() -> Result<BasePython> {
    let named = std::env::var_os(PYTHON_VARIABLE).filter(|path| !path.is_empty());
    let candidates: Vec<PathBuf> = match &named {
        Some(path) => vec![PathBuf::from(path)],
        None => [&format!("python{PYTHON_VERSION}"), "python3", "python"]
            .iter()
            .map(PathBuf::from)
            .collect(),
    };
    let mut seen = Vec::new();
    for path in candidates {
        let mut ask = Command::new(&path);
        ask.args(["-c", "import sys; print('%d.%d.%d' % sys.version_info[:3])"]);
        match command::output(ask) {
            Ok(version) => {
                let version = version.trim().to_owned();
                if version.starts_with(&format!("{PYTHON_VERSION}.")) {
                    return Ok(BasePython { path, version });
                }
                seen.push(format!("{} is {version}", path.display()));
            }
            Err(_) => seen.push(format!("{} is not there", path.display())),
        }
    }
    bail!(
        "no Python {PYTHON_VERSION}, for which the lock files hold wheels ({}): set \
         {PYTHON_VARIABLE} to one",
        seen.join(", ")
    )
}
