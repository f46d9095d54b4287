// SPDX-License-Identifier: Apache-2.0

//! The frontend built from the patched crates.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use clap::Args;

use crate::cache::{Cache, Key, project_root};
use crate::command;
use crate::env;
use crate::own_crates;
use crate::patch;
use crate::unchanged;
use crate::upstream::Pins;

/// The program's name.
pub(crate) const NAME: &str = "kvdelta-frontend";

/// What Dynamo's crates need.
const RUSTFLAGS: &str = "--cfg tokio_unstable";

/// Options of `cargo xtask frontend`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  cargo xtask frontend                                   builds it and prints its path
  cargo xtask frontend --release --out /opt/dynamo/bin   an optimised one, copied to a folder
  cargo xtask frontend --update-lock                     after a change of what the crates depend on

docs/frontend.md tells how to run it in place of python -m dynamo.frontend.")]
pub(crate) struct Options {
    /// Optimise, for use in production; a build of its own, with all of Dynamo's crates again.
    #[arg(long)]
    release: bool,
    /// Copy the program to this folder; one that runs from there goes on undisturbed.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Build nothing; write what the patched crates depend on into the frontend's lock file. Versions that
    /// it has stay.
    #[arg(long, conflicts_with_all = ["release", "out"])]
    update_lock: bool,
}

/// How the frontend is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Profile {
    /// Quick to build.
    Dev,
    /// Quick to run.
    Release,
}

impl Profile {
    /// What cargo is told.
    pub(crate) fn flag(self) -> Option<&'static str> {
        match self {
            Self::Dev => None,
            Self::Release => Some("--release"),
        }
    }

    /// Where cargo puts what it built.
    pub(crate) fn folder(self) -> &'static str {
        match self {
            Self::Dev => "debug",
            Self::Release => "release",
        }
    }
}

/// Runs `cargo xtask frontend`.
pub(crate) fn run(cache: &Cache, options: &Options) -> Result<ExitCode> {
    if options.update_lock {
        println!("{}", update_lock(cache)?.display());
        return Ok(ExitCode::SUCCESS);
    }
    let profile = if options.release {
        Profile::Release
    } else {
        Profile::Dev
    };
    let built = build(cache, profile)?;
    let program = match &options.out {
        Some(folder) => install(&built, folder)
            .with_context(|| format!("--out: cannot copy to {}", folder.display()))?,
        None => built,
    };
    println!("{}", program.display());
    Ok(ExitCode::SUCCESS)
}

/// Copies `program` into `folder`, in place of an older one at once: the file of a running program
/// cannot be written.
fn install(program: &Path, folder: &Path) -> Result<PathBuf> {
    fs::create_dir_all(folder)?;
    let target = folder.join(NAME);
    let scratch = tempfile::NamedTempFile::new_in(folder)?.into_temp_path();
    fs::copy(program, &scratch)?;
    scratch.persist(&target)?;
    Ok(target)
}

/// The folder of the frontend's sources.
pub(crate) fn folder() -> PathBuf {
    project_root().join("tests/dynamo-frontend")
}

/// The built frontend, from the cache if nothing that goes into it has changed.
pub(crate) fn build(cache: &Cache, profile: Profile) -> Result<PathBuf> {
    let mut key = patched_key(cache, &folder())?
        .file(&folder().join("Cargo.toml"))?
        .file(&lock_file())?
        .file(&folder().join("build.rs"))?;
    for source in sources(&folder().join("src"))? {
        let text =
            fs::read(&source).with_context(|| format!("cannot read {}", source.display()))?;
        let name = source.strip_prefix(folder())?.to_string_lossy();
        key = key.part(&name, &text);
    }
    if let Some(flag) = profile.flag() {
        key = key.part("profile", flag.as_bytes());
    }
    let entry = cache.entry(NAME, &key, |entry| {
        let mut cargo = cargo(cache, "build")?;
        cargo.args(profile.flag());
        let log = cache.folder("logs")?.join(format!("{NAME}.log"));
        let step = "frontend from the patched crates (about 850 crates when cold)";
        command::logged(step, cargo, &log)?;
        let built = target(cache)?.join(profile.folder()).join(NAME);
        fs::copy(&built, entry.join(NAME))
            .with_context(|| format!("cannot copy {}", built.display()))?;
        Ok(())
    })?;
    Ok(entry.join(NAME))
}

/// `key` with the compiler and its flags.
pub(crate) fn build_key(key: Key) -> Result<Key> {
    Ok(key
        .part("rustc", rustc_version()?.as_bytes())
        .part("rustflags", RUSTFLAGS.as_bytes()))
}

/// What decides a build of the package in `user` on the patched crates, its own files aside.
pub(crate) fn patched_key(cache: &Cache, user: &Path) -> Result<Key> {
    own_crates::key(
        build_key(patch::crates_key(cache)?)?,
        &patch::crates(cache)?,
        &Pins::read()?,
        user,
    )
}

/// The frontend's lock file, which has all that the patched crates depend on.
pub(crate) fn lock_file() -> PathBuf {
    folder().join("Cargo.lock")
}

/// Writes the lock file again for the patched crates of today.
fn update_lock(cache: &Cache) -> Result<PathBuf> {
    let path = lock_file();
    let read = |path: &Path| {
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
    };
    let before = read(&path)?;
    // This repository's crates are tested with the workspace's versions.
    let versions = own_crates::with_versions(&before, &read(&project_root().join("Cargo.lock"))?)?;
    fs::write(&path, versions).with_context(|| format!("cannot write {}", path.display()))?;
    let mut update = unlocked_cargo(cache, "update")?;
    update.arg("--workspace");
    let log = cache.folder("logs")?.join("update-lock.log");
    if let Err(error) = command::logged("lock file of the frontend", update, &log) {
        fs::write(&path, before).with_context(|| format!("cannot write {}", path.display()))?;
        return Err(error);
    }
    Ok(path)
}

/// One of the programs in the frontend's `examples` folder, built.
pub(crate) fn example(cache: &Cache, name: &str) -> Result<PathBuf> {
    let mut cargo = cargo(cache, "build")?;
    cargo.args(["--example", name]);
    let log = cache.folder("logs")?.join(format!("{name}.log"));
    command::logged(name, cargo, &log)?;
    Ok(target(cache)?.join("debug/examples").join(name))
}

/// A cargo command on the frontend's workspace with the patched crates in place of the registry's.
pub(crate) fn cargo(cache: &Cache, subcommand: &str) -> Result<Command> {
    let mut cargo = unlocked_cargo(cache, subcommand)?;
    cargo.arg("--locked");
    Ok(cargo)
}

fn unlocked_cargo(cache: &Cache, subcommand: &str) -> Result<Command> {
    let patched = patch::crates(cache)?;
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .arg(subcommand)
        .current_dir(folder())
        .env("KVDELTA_PATCHED", "1")
        .env("CARGO_TARGET_DIR", target(cache)?);
    build_environment(&mut cargo, cache)?;
    patch_registry(&mut cargo, &Pins::read()?, &patched)?;
    Ok(cargo)
}

/// The tools that builds of Dynamo's crates call, none of them system-wide.
pub(crate) fn build_environment(cargo: &mut Command, cache: &Cache) -> Result<()> {
    let mut cxx = Command::new("g++");
    cxx.arg("--version");
    command::output(cxx).context("Dynamo's crates contain C++: install g++")?;
    // The library comes without the compiler's own headers.
    let mut ask = Command::new("cc");
    ask.arg("-print-file-name=include");
    let headers = command::output(ask)?;
    without_own_package(cargo);
    cargo
        .env("RUSTFLAGS", RUSTFLAGS)
        .env("PROTOC", env::protoc(cache)?)
        .env("LIBCLANG_PATH", env::libclang(cache)?)
        .env("BINDGEN_EXTRA_CLANG_ARGS", format!("-I{}", headers.trim()));
    Ok(())
}

/// Takes away what `cargo xtask` says of its own package.
///
/// Build scripts that watch these variables (ring's does) would run again for every clone, and half
/// of Dynamo's crates with them.
pub(crate) fn without_own_package(cargo: &mut Command) {
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            cargo.env_remove(&name);
        }
    }
}

/// Puts the patched crates in place of the registry's, and adds those of this repository that they
/// depend on.
pub(crate) fn patch_registry(cargo: &mut Command, pins: &Pins, patched: &Path) -> Result<()> {
    for pin in &pins.crates {
        cargo.arg("--config").arg(format!(
            "patch.crates-io.{}.path={:?}",
            pin.name,
            patched.join(&pin.path).display().to_string()
        ));
    }
    own_crates::patch_registry(cargo, patched, pins)
}

/// The build folder that all builds of Dynamo's crates share.
pub(crate) fn target(cache: &Cache) -> Result<PathBuf> {
    cache.target("frontend", &[folder(), unchanged::folder()])
}

/// The compiler that this clone is built with.
pub(crate) fn rustc_version() -> Result<String> {
    let mut rustc = Command::new("rustc");
    rustc.arg("-vV").current_dir(project_root());
    command::output(rustc)
}

/// Every file under `folder`, sorted.
pub(crate) fn sources(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let entries =
        fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            files.extend(sources(&path)?);
        } else {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_does_not_know_which_clone_asked_for_it() {
        let mut env = Command::new("env");
        without_own_package(&mut env);
        let variables = command::output(env).unwrap();
        assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some());
        for name in ["CARGO_MANIFEST_DIR=", "CARGO_PKG_NAME="] {
            assert!(!variables.contains(name), "{variables}");
        }
    }

    #[test]
    fn an_installed_program_takes_the_place_of_a_running_one() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("bin");
        let sleep = PathBuf::from("/bin/sleep");
        let installed = install(&sleep, &out).unwrap();
        let mut running = Command::new(&installed).arg("60").spawn().unwrap();
        let again = install(&sleep, &out);
        running.kill().unwrap();
        running.wait().unwrap();
        assert_eq!(again.unwrap(), installed);
        let left: Vec<_> = fs::read_dir(&out).unwrap().collect();
        assert_eq!(left.len(), 1, "{left:?}");
        let mut version = Command::new(&installed);
        version.arg("0");
        command::output(version).expect("it can still be executed");
    }
}
