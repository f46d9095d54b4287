// SPDX-License-Identifier: Apache-2.0

//! The crates of this repository that patched sources depend on, and their place in lock files.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::cache::{Key, project_root};
use crate::frontend::sources;
use crate::upstream::Pins;

/// How the names of all of them begin.
const PREFIX: &str = "kvdelta-";

#[derive(Debug, Deserialize)]
struct Manifest {
    #[serde(default)]
    dependencies: BTreeMap<String, toml::Value>,
}

impl Manifest {
    fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("Cargo.toml");
        let text =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        toml::from_str(&text).with_context(|| format!("cannot understand {}", path.display()))
    }

    fn own(self) -> impl Iterator<Item = String> {
        let names = self.dependencies.into_keys();
        names.filter(|name| name.starts_with(PREFIX))
    }
}

/// The folder of one of this clone's crates.
fn folder(name: &str) -> PathBuf {
    project_root().join("crates").join(name)
}

/// The crates that the pinned crates in `tree` name as their dependencies.
fn direct(tree: &Path, pins: &Pins) -> Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for pin in &pins.crates {
        for name in Manifest::read(&tree.join(&pin.path))?.own() {
            if !folder(&name).is_dir() {
                bail!("{}: depends on {name}, which this clone has not", pin.name);
            }
            names.insert(name);
        }
    }
    Ok(names)
}

/// Those, the ones that the package in `user` names, and all that these depend on.
fn all(tree: &Path, pins: &Pins, user: &Path) -> Result<BTreeSet<String>> {
    let mut first: Vec<String> = direct(tree, pins)?.into_iter().collect();
    first.extend(Manifest::read(user)?.own());
    with_dependencies(first)
}

/// These crates of this repository, and all of its crates that they depend on.
fn with_dependencies(mut left: Vec<String>) -> Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    while let Some(name) = left.pop() {
        left.extend(Manifest::read(&folder(&name))?.own());
        names.insert(name);
    }
    Ok(names)
}

/// Lets a cargo command find the crates that `tree` depends on in this clone. Only those: cargo wants
/// a lock file to name patches that nothing uses.
pub(crate) fn patch_registry(cargo: &mut Command, tree: &Path, pins: &Pins) -> Result<()> {
    for name in direct(tree, pins)? {
        let path = folder(&name).display().to_string();
        cargo
            .arg("--config")
            .arg(format!("patch.crates-io.{name}.path={path:?}"));
    }
    Ok(())
}

/// `key` with the sources of the crates that the package in `user`, built on `tree`, depends on.
pub(crate) fn key(key: Key, tree: &Path, pins: &Pins, user: &Path) -> Result<Key> {
    let names = all(tree, pins, user)?;
    if names.is_empty() {
        return Ok(key);
    }
    with_sources(key, names)
}

/// `key` with the sources of a crate of this repository and of those that it depends on.
pub(crate) fn key_of(key: Key, name: &str) -> Result<Key> {
    with_sources(key, with_dependencies(vec![name.to_owned()])?)
}

fn with_sources(mut key: Key, names: BTreeSet<String>) -> Result<Key> {
    #[derive(Deserialize)]
    struct Root {
        workspace: toml::Table,
    }
    // What their manifests inherit.
    let manifest = project_root().join("Cargo.toml");
    let text = fs::read_to_string(&manifest)
        .with_context(|| format!("cannot read {}", manifest.display()))?;
    let root: Root = toml::from_str(&text)
        .with_context(|| format!("cannot understand {}", manifest.display()))?;
    for part in ["package", "dependencies"] {
        if let Some(value) = root.workspace.get(part) {
            key = key.part(part, toml::to_string(value)?.as_bytes());
        }
    }
    for name in names {
        let folder = folder(&name);
        let mut files = vec![folder.join("Cargo.toml")];
        files.extend(sources(&folder.join("src"))?);
        for file in files {
            let text =
                fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
            let file = file.strip_prefix(&folder)?.to_string_lossy().into_owned();
            key = key.part(&format!("{name}/{file}"), &text);
        }
    }
    Ok(key)
}

#[derive(Debug, Deserialize)]
struct Lock {
    #[serde(default)]
    package: Vec<Package>,
}

#[derive(Debug, Deserialize)]
struct Package {
    name: String,
    version: String,
    source: Option<String>,
    checksum: Option<String>,
    #[serde(default)]
    dependencies: Vec<String>,
}

/// The lock file `lock`, with the versions in `from` of what this repository's crates depend on wherever it
/// has no version that fits. Cargo takes them in place of the newest and drops what it does not need.
pub(crate) fn with_versions(lock: &str, from: &str) -> Result<String> {
    let parse =
        |text: &str| -> Result<Lock> { toml::from_str(text).context("not a lock file of cargo") };
    let there: BTreeSet<(String, String)> = parse(lock)?
        .package
        .into_iter()
        .map(|package| (package.name, compatible(&package.version)))
        .collect();
    let packages = parse(from)?.package;
    let own = packages.iter().filter(|package| {
        package.source.is_none()
            && package.name.starts_with(PREFIX)
            && folder(&package.name).is_dir()
    });
    let mut left: Vec<&Package> = own.collect();
    let mut wanted: BTreeMap<(&str, &str), &Package> = BTreeMap::new();
    while let Some(package) = left.pop() {
        let key = (package.name.as_str(), package.version.as_str());
        if wanted.insert(key, package).is_none() {
            for dependency in &package.dependencies {
                // Its version follows where there are several.
                let mut words = dependency.split(' ');
                let (name, version) = (words.next(), words.next());
                left.extend(packages.iter().filter(|package| {
                    name == Some(&package.name)
                        && version.is_none_or(|version| version == package.version)
                }));
            }
        }
    }
    let mut text = lock.to_owned();
    for package in wanted.into_values() {
        let line = (package.name.clone(), compatible(&package.version));
        if let (Some(source), false) = (&package.source, there.contains(&line)) {
            // Without its dependencies, which may be of other versions here.
            let _ = write!(
                text,
                "\n[[package]]\nname = {:?}\nversion = {:?}\nsource = {source:?}\n",
                package.name, package.version
            );
            if let Some(checksum) = &package.checksum {
                let _ = writeln!(text, "checksum = {checksum:?}");
            }
        }
    }
    Ok(text)
}

/// What two versions have in common of which cargo takes only one: up to the first number above 0.
fn compatible(version: &str) -> String {
    let mut common: Vec<&str> = Vec::new();
    for number in version.split('.') {
        common.push(number);
        if number != "0" {
            break;
        }
    }
    common.join(".")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command;
    use crate::upstream::tests::pins;

    fn tree(dependencies: &str) -> tempfile::TempDir {
        let tree = tempfile::tempdir().unwrap();
        let folder = tree.path().join("lib/x");
        fs::create_dir_all(&folder).unwrap();
        let manifest = format!("[package]\nname = \"dynamo-x\"\n{dependencies}");
        fs::write(folder.join("Cargo.toml"), manifest).unwrap();
        tree
    }

    /// A package that depends on no crate of this repository.
    fn user() -> tempfile::TempDir {
        let user = tempfile::tempdir().unwrap();
        fs::write(user.path().join("Cargo.toml"), "[package]\nname = \"y\"\n").unwrap();
        user
    }

    const INDEXER: &str = "[dependencies.kvdelta-indexer]\nversion = \"0.1.0\"\n";

    #[test]
    fn only_what_the_tree_depends_on_is_patched_and_keyed() {
        let (pins, without, with) = (pins(""), tree("[dependencies]\nx = \"1\"\n"), tree(INDEXER));
        let arguments = |tree: &tempfile::TempDir| {
            let mut echo = Command::new("echo");
            patch_registry(&mut echo, tree.path(), &pins).unwrap();
            command::output(echo).unwrap()
        };
        assert_eq!(arguments(&without).trim(), "");
        let shown = arguments(&with);
        let path = project_root().join("crates/kvdelta-indexer");
        let wanted = format!(
            "patch.crates-io.kvdelta-indexer.path=\"{}\"",
            path.display()
        );
        assert!(shown.contains(&wanted), "{shown}");
        let keyed = |tree: &tempfile::TempDir, user: &Path| {
            key(Key::new(), tree.path(), &pins, user).unwrap().hex()
        };
        let none = user();
        assert_ne!(keyed(&without, none.path()), keyed(&with, none.path()));
        assert_eq!(keyed(&without, none.path()), Key::new().hex());
        assert_eq!(
            keyed(&without, &with.path().join("lib/x")),
            keyed(&with, none.path())
        );
    }

    #[test]
    fn a_crate_brings_the_ones_that_it_depends_on() {
        let tree = tree("[dependencies.kvdelta-overlap]\nversion = \"0.1.0\"\n");
        let names = all(tree.path(), &pins(""), user().path()).unwrap();
        assert!(names.contains("kvdelta-overlap") && names.contains("kvdelta-indexer"));
    }

    #[test]
    fn a_crate_that_is_not_here_is_named() {
        let tree = tree("[dependencies.kvdelta-nothing]\nversion = \"0.1.0\"\n");
        let error = direct(tree.path(), &pins("")).unwrap_err().to_string();
        assert!(
            error.contains("dynamo-x") && error.contains("kvdelta-nothing"),
            "{error}"
        );
    }

    #[test]
    fn versions_that_a_lock_file_lacks_are_added_and_no_others() {
        let package = |name: &str, version: &str, rest: &str| {
            format!("\n[[package]]\nname = \"{name}\"\nversion = \"{version}\"\n{rest}")
        };
        let registry = "source = \"registry+somewhere\"\nchecksum = \"00\"\n";
        let from = [
            "version = 4\n".to_owned(),
            package(
                "kvdelta-indexer",
                "0.1.0",
                "dependencies = [\n \"a\",\n \"b 0.2.1\",\n]\n",
            ),
            package(
                "a",
                "1.0.1",
                &format!("{registry}dependencies = [\n \"c\",\n]\n"),
            ),
            package("b", "0.1.0", registry),
            package("b", "0.2.1", registry),
            package("c", "1.0.0", registry),
            package(
                "kvdelta-frontend",
                "0.1.0",
                "dependencies = [\n \"d\",\n]\n",
            ),
            package("d", "1.0.0", registry),
        ]
        .concat();
        let lock = [
            "version = 4\n".to_owned(),
            package("a", "1.0.0", registry),
            package("b", "0.1.1", registry),
        ]
        .concat();
        assert_eq!(
            with_versions(&lock, &from).unwrap(),
            [
                lock.clone(),
                package("b", "0.2.1", registry),
                package("c", "1.0.0", registry)
            ]
            .concat()
        );
        assert_eq!(with_versions(&lock, "version = 4\n").unwrap(), lock);
    }
}
