// SPDX-License-Identifier: Apache-2.0

//! The wheel of the Python module `kvdelta`, and what engines with kvdelta's connector find before their packages.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::beside;
use crate::cache::{Cache, Key, members, project_root};
use crate::command;
use crate::env;
use crate::fleet::Connector;
use crate::frontend;
use crate::own_crates;
use crate::pytest;
use crate::workers;

/// The crate that has the bindings.
const CRATE: &str = "kvdelta-transfer";
/// What a wheel has beside the sources of Rust.
const PACKAGING: [&str; 2] = ["pyproject.toml", "kvdelta.pyi"];

/// Options of `cargo xtask wheel`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  cargo xtask wheel                  builds it and prints its path
  cargo xtask wheel --out wheels     a copy of it, for pip install

What else engines need: docs/transfer.md for vLLM, docs/sglang.md for SGLang.")]
pub(crate) struct Options {
    /// Copy the wheel to this folder.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Runs `cargo xtask wheel`.
pub(crate) fn run(cache: &Cache, options: &Options) -> Result<ExitCode> {
    let built = only_wheel(&build(cache)?)?;
    let shown = match &options.out {
        Some(folder) => copy(&built, folder)
            .with_context(|| format!("--out: cannot copy to {}", folder.display()))?,
        None => built,
    };
    println!("{}", shown.display());
    Ok(ExitCode::SUCCESS)
}

fn copy(wheel: &Path, folder: &Path) -> Result<PathBuf> {
    fs::create_dir_all(folder)?;
    let target = folder.join(wheel.file_name().unwrap_or_default());
    fs::copy(wheel, &target)?;
    Ok(target)
}

/// What goes into PYTHONPATH for kvdelta's connector: the unpacked wheel, and this clone's package for vLLM.
pub(crate) fn overlay(cache: &Cache) -> Result<[PathBuf; 2]> {
    Ok([build(cache)?.join(UNPACKED), vllm_folder()])
}

/// kvdelta's connector, with its own defaults.
pub(crate) fn connector(cache: &Cache) -> Result<Connector> {
    Ok(Connector::Kvdelta {
        overlay: overlay(cache)?,
        settings: serde_json::Map::new(),
    })
}

/// The folder of the Python package for vLLM.
pub(crate) fn vllm_folder() -> PathBuf {
    project_root().join("backends/vllm")
}

/// The folder of the Python package for SGLang.
pub(crate) fn sglang_folder() -> PathBuf {
    project_root().join("backends/sglang")
}

/// The folder in the tests of that package of those that need a frontend.
const FLEET: &str = "fleet";

/// The folder of the crate, its Python files among the others.
pub(crate) fn crate_folder() -> PathBuf {
    project_root().join("crates").join(CRATE)
}

/// Where an entry has the files of its wheel.
const UNPACKED: &str = "unpacked";

/// A folder with the wheel, and with its files in [`UNPACKED`].
fn build(cache: &Cache) -> Result<PathBuf> {
    let python = env::tools(cache)?;
    let folder = crate_folder();
    let mut key = Key::new()
        .part("rustc", frontend::rustc_version()?.as_bytes())
        .part("maturin", maturin()?.as_bytes())
        .file(&project_root().join("Cargo.lock"))?;
    for file in PACKAGING {
        key = key.file(&folder.join(file))?;
    }
    let key = own_crates::key_of(key, CRATE)?;
    cache.entry("wheel-kvdelta", &key, |entry| {
        let mut maturin = Command::new(&python);
        maturin
            .args(["-m", "maturin", "build", "--release", "--locked"])
            .arg("--interpreter")
            .arg(&python)
            .arg("--manifest-path")
            .arg(folder.join("Cargo.toml"))
            .arg("--out")
            .arg(entry)
            .current_dir(project_root())
            .env("CARGO_TARGET_DIR", cache.target("wheel", &members())?);
        frontend::without_own_package(&mut maturin);
        let log = cache.folder("logs")?.join("wheel-kvdelta.log");
        command::logged("wheel of kvdelta", maturin, &log)?;
        let mut unpack = Command::new(&python);
        unpack
            .args(["-m", "zipfile", "--extract"])
            .arg(only_wheel(entry)?)
            .arg(entry.join(UNPACKED));
        command::quiet(unpack, &log)
    })
}

/// Tests the module, and compares its stub with it.
pub(crate) fn check(cache: &Cache) -> Result<()> {
    let python = env::tools(cache)?;
    let unpacked = build(cache)?.join(UNPACKED);
    // mypy leaves its cache behind.
    let scratch = tempfile::tempdir()?;
    let mut stubtest = Command::new(&python);
    stubtest
        .args(["-m", "mypy.stubtest", "kvdelta", "--allowlist"])
        .arg(env::engines_folder().join("stubtest.txt"))
        .env("PYTHONPATH", &unpacked)
        .env("MYPYPATH", &unpacked)
        .current_dir(scratch.path());
    command::shown_run(stubtest)?;
    let tests = crate_folder().join("tests");
    let files = std::slice::from_ref(&tests);
    pytest::run(cache, &python, &[&unpacked], &[], &tests, files, &[])
}

/// Runs the tests of the package for vLLM, in the environment of the engines.
pub(crate) fn test_vllm(cache: &Cache) -> Result<()> {
    let [module, package] = overlay(cache)?;
    let (python, tests) = (env::engines(cache)?, package.join("tests"));
    let path = [module.as_path(), &package];
    let options = ["-W", "ignore"];
    pytest::run(cache, &python, &path, &options, &package, &[tests], &[])
}

/// Runs the tests of the package for SGLang and of SGLang itself, which runs beside the engines with the patched
/// workers before them.
pub(crate) fn test_sglang(cache: &Cache) -> Result<()> {
    sglang_tests(cache, None)
}

/// Runs the package for SGLang in a whole fleet.
pub(crate) fn test_sglang_fleet(cache: &Cache) -> Result<()> {
    let frontend = frontend::build(cache, frontend::Profile::Dev)?;
    sglang_tests(cache, Some(&frontend))
}

/// With a frontend those of the fleet, without all others.
fn sglang_tests(cache: &Cache, frontend: Option<&Path>) -> Result<()> {
    let (python, package) = (env::engines(cache)?, sglang_folder());
    let workers = workers::overlay(cache, &python)?.context(workers::NONE)?;
    let (module, model) = (build(cache)?.join(UNPACKED), env::model(cache, &python)?);
    let [stand_ins, sglang] = env::sglang(cache)?;
    let path = [&module, &package, &workers, &stand_ins, &sglang].map(PathBuf::as_path);
    let tests = package.join("tests");
    let (fleet, model) = (tests.join(FLEET), ("KVDELTA_TEST_MODEL", model.as_os_str()));
    let run = |options: &[&str], tests: PathBuf, variables: &[(&str, &OsStr)]| {
        let options = [options, &["-W", "ignore"]].concat();
        pytest::run(
            cache,
            &python,
            &path,
            &options,
            &package,
            &[tests],
            variables,
        )
    };
    match frontend {
        Some(frontend) => {
            let frontend = ("KVDELTA_TEST_FRONTEND", frontend.as_os_str());
            run(&[], fleet, &[model, frontend])
        }
        None => {
            let ignored = format!("--ignore={}", fleet.display());
            let observe = beside::program(cache)?;
            let observe = ("KVDELTA_TEST_COMMAND", observe.as_os_str());
            run(&[&ignored], tests, &[model, observe])
        }
    }
}

/// The line of maturin in the lock of the tools.
fn maturin() -> Result<String> {
    let path = env::engines_folder().join("tools.lock");
    let lock =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let line = lock.lines().find(|line| line.starts_with("maturin=="));
    Ok(line.context("tools.lock has no maturin")?.to_owned())
}

fn only_wheel(folder: &Path) -> Result<PathBuf> {
    let entries =
        fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let wheels: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|end| end == "whl"))
        .collect();
    match wheels.as_slice() {
        [wheel] => Ok(wheel.clone()),
        _ => bail!("{}: {} wheels, expected 1", folder.display(), wheels.len()),
    }
}
