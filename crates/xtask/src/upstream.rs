// SPDX-License-Identifier: Apache-2.0

//! The pinned upstream sources: crates fetched by cargo, wheels by uv; checked, unpacked.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::cache::{Cache, project_root, sha256};
use crate::command;
use crate::env;
use crate::frontend::sources;

/// The folder of the patch series for one Dynamo version.
pub(crate) fn series_folder() -> PathBuf {
    project_root().join("patches/dynamo-1.6.1")
}

/// `pins.toml`: one Dynamo version, and the crates and wheels of it that the series touches.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Pins {
    /// Version of every crate and wheel.
    pub(crate) version: String,
    /// Commit of Dynamo's repository that the crates were packed from.
    pub(crate) commit: String,
    /// The crates.
    #[serde(rename = "crate")]
    pub(crate) crates: Vec<Pin>,
    /// The wheels.
    #[serde(rename = "wheel")]
    pub(crate) wheels: Vec<Wheel>,
}

/// One pinned crate.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Pin {
    /// Name on the registry.
    pub(crate) name: String,
    /// Folder in Dynamo's repository.
    pub(crate) path: String,
    /// SHA-256 of the packed crate.
    pub(crate) sha256: String,
}

/// One pinned wheel, of which only the Python files are taken.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Wheel {
    /// Name on the Python package index.
    pub(crate) name: String,
    /// Folder in Dynamo's repository that it was packed from.
    pub(crate) path: String,
    /// SHA-256 of the wheel.
    pub(crate) sha256: String,
}

#[derive(Deserialize)]
struct VcsInfo {
    git: Git,
    path_in_vcs: String,
}

#[derive(Deserialize)]
struct Git {
    sha1: String,
}

impl Pins {
    /// Reads `pins.toml` of the series.
    pub(crate) fn read() -> Result<Self> {
        let path = series_folder().join("pins.toml");
        let text =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        toml::from_str(&text).with_context(|| format!("cannot understand {}", path.display()))
    }

    /// Fetches every crate and wheel.
    ///
    /// # Errors
    /// One that cannot be had, or whose checksum is not the pinned one.
    pub(crate) fn fetch(&self, cache: &Cache) -> Result<Fetched> {
        let wheels = self.wheels.iter();
        Ok(Fetched {
            crates: self.fetch_crates()?,
            wheels: wheels
                .map(|wheel| env::wheel(cache, &wheel.name, &self.version, &wheel.sha256))
                .collect::<Result<_>>()?,
        })
    }

    fn fetch_crates(&self) -> Result<Vec<Vec<u8>>> {
        self.crates
            .iter()
            .map(|pin| {
                let packed = fetch(&pin.name, &self.version)?;
                pin.check(&self.version, &packed)?;
                Ok(packed)
            })
            .collect()
    }

    /// Unpacks what was fetched under `target`, each at its path in Dynamo's repository.
    pub(crate) fn unpack(&self, fetched: &Fetched, target: &Path) -> Result<()> {
        for (pin, packed) in self.crates.iter().zip(&fetched.crates) {
            let folder = target.join(&pin.path);
            pin.unpack(&self.version, &self.commit, packed, &folder)
                .with_context(|| format!("cannot unpack {} {}", pin.name, self.version))?;
        }
        for (wheel, fetched) in self.wheels.iter().zip(&fetched.wheels) {
            copy_python(fetched, &target.join(&wheel.path))?;
        }
        Ok(())
    }
}

/// What [`Pins::unpack`] unpacks, in the order of the pins.
#[derive(Debug)]
pub(crate) struct Fetched {
    /// Packed.
    crates: Vec<Vec<u8>>,
    /// Folders of their Python files.
    wheels: Vec<PathBuf>,
}

/// Copies the Python files under `source`. Not by a link: patches change the copies.
pub(crate) fn copy_python(source: &Path, target: &Path) -> Result<()> {
    for file in sources(source)? {
        if file.extension().is_some_and(|py| py == "py") {
            let to = target.join(file.strip_prefix(source)?);
            fs::create_dir_all(to.parent().unwrap_or(target))?;
            fs::copy(&file, &to).with_context(|| format!("cannot write {}", to.display()))?;
        }
    }
    Ok(())
}

impl Pin {
    fn check(&self, version: &str, packed: &[u8]) -> Result<()> {
        let found = sha256(packed);
        if found != self.sha256 {
            bail!(
                "{} {version}: the registry's source has SHA-256 {found}, pinned is {}; \
                 nothing was applied",
                self.name,
                self.sha256
            );
        }
        Ok(())
    }

    fn unpack(&self, version: &str, commit: &str, packed: &[u8], folder: &Path) -> Result<()> {
        let parent = folder.parent().context("a pinned path has no parent")?;
        fs::create_dir_all(parent)?;
        let scratch = tempfile::tempdir_in(parent)?;
        tar::Archive::new(flate2::read::GzDecoder::new(packed)).unpack(scratch.path())?;
        fs::rename(
            scratch.path().join(format!("{}-{version}", self.name)),
            folder,
        )?;
        let info: VcsInfo =
            serde_json::from_str(&fs::read_to_string(folder.join(".cargo_vcs_info.json"))?)?;
        if info.git.sha1 != commit || info.path_in_vcs != self.path {
            bail!(
                "packed from commit {} at {}, pinned is {commit} at {}",
                info.git.sha1,
                info.path_in_vcs,
                self.path
            );
        }
        Ok(())
    }
}

/// One file of a packed crate, whose checksum must be `pinned`.
pub(crate) fn file_of(name: &str, version: &str, pinned: &str, file: &str) -> Result<Vec<u8>> {
    let pin = Pin {
        name: name.to_owned(),
        path: String::new(),
        sha256: pinned.to_owned(),
    };
    let packed = fetch(name, version)?;
    pin.check(version, &packed)?;
    let wanted = Path::new(&format!("{name}-{version}")).join(file);
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(packed.as_slice()));
    for entry in archive.entries()? {
        let mut entry = entry?;
        if entry.path()? == wanted {
            let mut contents = Vec::new();
            entry.read_to_end(&mut contents)?;
            return Ok(contents);
        }
    }
    bail!("{name} {version} has no file {file}")
}

/// The packed crate `name`: from cargo's cache, else from its registry by way of the cache.
fn fetch(name: &str, version: &str) -> Result<Vec<u8>> {
    let file = format!("{name}-{version}.crate");
    if let Some(packed) = cached(&file)? {
        return Ok(packed);
    }
    // Of cargo's commands only `info` fetches a single crate; it leaves it in the cache.
    let mut info = Command::new(env!("CARGO"));
    info.args(["info", "--quiet", &format!("{name}@{version}")])
        .current_dir(std::env::temp_dir());
    command::output(info).with_context(|| format!("cannot fetch {name} {version}"))?;
    cached(&file)?.with_context(|| {
        format!("cargo fetched {name} {version}, but its cache does not hold {file}")
    })
}

/// The file of this name in cargo's cache of any registry.
fn cached(file: &str) -> Result<Option<Vec<u8>>> {
    let folder = cargo_home()?.join("registry/cache");
    let Ok(registries) = fs::read_dir(&folder) else {
        return Ok(None);
    };
    for registry in registries {
        let path = registry?.path().join(file);
        if path.exists() {
            let packed =
                fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            return Ok(Some(packed));
        }
    }
    Ok(None)
}

fn cargo_home() -> Result<PathBuf> {
    match std::env::var_os("CARGO_HOME") {
        Some(path) => Ok(PathBuf::from(path)),
        None => {
            let home = std::env::var_os("HOME").context("neither CARGO_HOME nor HOME is set")?;
            Ok(Path::new(&home).join(".cargo"))
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    fn pin(sha256: &str) -> Pin {
        Pin {
            name: "dynamo-x".into(),
            path: "lib/x".into(),
            sha256: sha256.into(),
        }
    }

    /// The pins of one crate.
    pub(crate) fn pins(sha256: &str) -> Pins {
        Pins {
            version: "1.6.1".into(),
            commit: "c".into(),
            crates: vec![pin(sha256)],
            wheels: vec![Wheel {
                name: "dynamo-y".into(),
                path: "components".into(),
                sha256: sha256.into(),
            }],
        }
    }

    #[test]
    fn a_wheel_is_that_of_the_engines() {
        let pins = Pins::read().unwrap();
        assert!(!pins.wheels.is_empty());
        let lock = fs::read_to_string(env::engines_folder().join("requirements.lock")).unwrap();
        for wheel in pins.wheels {
            let line = format!(
                "{}=={} --hash=sha256:{}",
                wheel.name, pins.version, wheel.sha256
            );
            assert!(lock.lines().any(|locked| locked == line), "{line}");
        }
    }

    #[test]
    fn only_python_files_are_copied_and_not_as_links() {
        let (source, target) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::create_dir_all(source.path().join("dynamo/a")).unwrap();
        for name in ["dynamo/a/b.py", "dynamo/a/README.md"] {
            fs::write(source.path().join(name), "1").unwrap();
        }
        copy_python(source.path(), target.path()).unwrap();
        let copied = target.path().join("dynamo/a/b.py");
        assert_eq!(
            sources(target.path()).unwrap(),
            std::slice::from_ref(&copied)
        );
        fs::write(&copied, "2").unwrap();
        let original = fs::read_to_string(source.path().join("dynamo/a/b.py")).unwrap();
        assert_eq!(original, "1");
    }

    #[test]
    fn a_changed_source_is_refused_with_both_checksums() {
        let packed = b"packed";
        assert!(pin(&sha256(packed)).check("1.6.1", packed).is_ok());
        let error = pin("00ff").check("1.6.1", packed).unwrap_err().to_string();
        for part in [
            "dynamo-x 1.6.1",
            &sha256(packed),
            "00ff",
            "nothing was applied",
        ] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn a_source_of_another_commit_or_path_is_refused() {
        let packed = |vcs_info: &str| {
            let mut archive = tar::Builder::new(flate2::write::GzEncoder::new(
                Vec::new(),
                flate2::Compression::fast(),
            ));
            let mut header = tar::Header::new_gnu();
            header.set_size(vcs_info.len() as u64);
            header.set_mode(0o644);
            archive
                .append_data(
                    &mut header,
                    "dynamo-x-1.6.1/.cargo_vcs_info.json",
                    vcs_info.as_bytes(),
                )
                .unwrap();
            archive.into_inner().unwrap().finish().unwrap()
        };
        let unpack = |vcs_info: &str| {
            let folder = tempfile::tempdir().unwrap();
            pin("").unpack(
                "1.6.1",
                "c1",
                &packed(vcs_info),
                &folder.path().join("lib/x"),
            )
        };
        assert!(unpack(r#"{"git":{"sha1":"c1"},"path_in_vcs":"lib/x"}"#).is_ok());
        for other in [
            r#"{"git":{"sha1":"c2"},"path_in_vcs":"lib/x"}"#,
            r#"{"git":{"sha1":"c1"},"path_in_vcs":"lib/y"}"#,
        ] {
            assert!(unpack(other).is_err());
        }
    }

    #[test]
    fn the_pins_of_the_series_can_be_read() {
        let pins = Pins::read().unwrap();
        assert_eq!(pins.version, "1.6.1");
        assert!(pins.crates.iter().all(|pin| pin.sha256.len() == 64));
    }
}
