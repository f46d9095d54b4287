// SPDX-License-Identifier: Apache-2.0

//! The frontend built from the patched crates.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::cache::{Cache, project_root};
use crate::command;
use crate::env;
use crate::patch;
use crate::upstream::Pins;

/// The program's name.
pub(crate) const NAME: &str = "kvdelta-frontend";

/// What Dynamo's crates need.
const RUSTFLAGS: &str = "--cfg tokio_unstable";

/// A file of Dynamo's repository that the tests of dynamo-kv-router are compiled with and that its
/// package leaves out.
pub(crate) const LEFT_OUT_FILE: &str = "examples/router/policy-class-queues.yaml";

/// The folder of the frontend's sources.
pub(crate) fn folder() -> PathBuf {
    project_root().join("tests/dynamo-frontend")
}

/// The built frontend, from the cache if nothing that goes into it has changed.
pub(crate) fn build(cache: &Cache) -> Result<PathBuf> {
    let mut key = patch::key()?
        .part("rustc", rustc_version()?.as_bytes())
        .part("rustflags", RUSTFLAGS.as_bytes())
        .file(&folder().join("Cargo.toml"))?
        .file(&folder().join("Cargo.lock"))?
        .file(&folder().join("build.rs"))?;
    for source in sources(&folder().join("src"))? {
        let text =
            fs::read(&source).with_context(|| format!("cannot read {}", source.display()))?;
        let name = source.strip_prefix(folder())?.to_string_lossy();
        key = key.part(&name, &text);
    }
    let entry = cache.entry(NAME, &key, |entry| {
        let log = cache.folder("logs")?.join(format!("{NAME}.log"));
        command::logged(
            "frontend from the patched crates (about 850 crates when cold)",
            cargo(cache, "build")?,
            &log,
        )?;
        let built = target(cache)?.join("debug").join(NAME);
        fs::copy(&built, entry.join(NAME))
            .with_context(|| format!("cannot copy {}", built.display()))?;
        Ok(())
    })?;
    Ok(entry.join(NAME))
}

/// A cargo command on the frontend's workspace with the patched crates in place of the registry's.
pub(crate) fn cargo(cache: &Cache, subcommand: &str) -> Result<Command> {
    let patched = patch::patched(cache)?;
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .arg(subcommand)
        .arg("--locked")
        .current_dir(folder())
        .env("KVDELTA_PATCHED", "1")
        .env("CARGO_TARGET_DIR", target(cache)?);
    build_environment(&mut cargo, cache)?;
    patch_registry(&mut cargo, &Pins::read()?, &patched);
    Ok(cargo)
}

/// The tests of one patched crate, in a tree of their own: cargo adapts its lock file.
pub(crate) fn patched_test(cache: &Cache, name: &str, arguments: &[&str]) -> Result<Command> {
    let tree = cache.entry("dynamo-tested", &patch::key()?, |tree| {
        patch::prepare(tree)?;
        let file = tree.join(LEFT_OUT_FILE);
        fs::create_dir_all(file.parent().unwrap_or(tree))?;
        Ok(fs::write(file, "# Not in the package.\n")?)
    })?;
    let pins = Pins::read()?;
    let pin = pins
        .crates
        .iter()
        .find(|pin| pin.name == name)
        .with_context(|| format!("pins.toml has no crate {name}"))?;
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["test", "--quiet"]);
    patch_registry(&mut cargo, &pins, &tree);
    cargo
        .args(arguments)
        .current_dir(tree.join(&pin.path))
        .env("CARGO_TARGET_DIR", cache.folder("target/upstream-tests")?);
    build_environment(&mut cargo, cache)?;
    Ok(cargo)
}

/// The tools that builds of Dynamo's crates call, none of them system-wide.
fn build_environment(cargo: &mut Command, cache: &Cache) -> Result<()> {
    let mut cxx = Command::new("g++");
    cxx.arg("--version");
    command::output(cxx).context("Dynamo's crates contain C++: install g++")?;
    // The library comes without the compiler's own headers.
    let mut ask = Command::new("cc");
    ask.arg("-print-file-name=include");
    let headers = command::output(ask)?;
    cargo
        .env("RUSTFLAGS", RUSTFLAGS)
        .env("PROTOC", env::protoc(cache)?)
        .env("LIBCLANG_PATH", env::libclang(cache)?)
        .env("BINDGEN_EXTRA_CLANG_ARGS", format!("-I{}", headers.trim()));
    Ok(())
}

/// Puts the patched crates in place of the registry's.
fn patch_registry(cargo: &mut Command, pins: &Pins, patched: &Path) {
    for pin in &pins.crates {
        cargo.arg("--config").arg(format!(
            "patch.crates-io.{}.path={:?}",
            pin.name,
            patched.join(&pin.path).display().to_string()
        ));
    }
}

fn target(cache: &Cache) -> Result<PathBuf> {
    cache.folder("target/frontend")
}

fn rustc_version() -> Result<String> {
    let mut rustc = Command::new("rustc");
    rustc.arg("-vV").current_dir(project_root());
    command::output(rustc)
}

/// Every file under `folder`, sorted.
fn sources(folder: &Path) -> Result<Vec<PathBuf>> {
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
