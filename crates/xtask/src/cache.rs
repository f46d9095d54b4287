// SPDX-License-Identifier: Apache-2.0

//! The folder for what is costly to make: keyed by what went in, shared by all clones.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use crate::frontend::sources;
use crate::progress::say;

const VARIABLE: &str = "KVDELTA_CACHE";
/// Written last into a finished entry; an entry without it is made again.
const COMPLETE: &str = ".complete";

/// The cache folder.
#[derive(Debug)]
pub(crate) struct Cache {
    root: PathBuf,
}

impl Cache {
    /// `KVDELTA_CACHE`, else `kvdelta` in the user's cache directory.
    pub(crate) fn open() -> Result<Self> {
        let root = if let Some(path) = non_empty(VARIABLE) {
            PathBuf::from(path)
        } else if let Some(path) = non_empty("XDG_CACHE_HOME") {
            Path::new(&path).join("kvdelta")
        } else {
            let home = non_empty("HOME")
                .with_context(|| format!("neither {VARIABLE} nor HOME is set: set {VARIABLE}"))?;
            Path::new(&home).join(".cache/kvdelta")
        };
        fs::create_dir_all(&root)
            .with_context(|| format!("cannot make the cache folder {}", root.display()))?;
        let root = root
            .canonicalize()
            .with_context(|| format!("cannot resolve the cache folder {}", root.display()))?;
        Ok(Self { root })
    }

    #[cfg(test)]
    fn at(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
        }
    }

    /// A folder that is not keyed (build caches that check their own contents).
    pub(crate) fn folder(&self, name: &str) -> Result<PathBuf> {
        let path = self.root.join(name);
        fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(path)
    }

    /// The build folder `target/<name>`, which all clones share, for crates in `folders` of this one.
    ///
    /// Cargo tells a workspace's files by their path within it and by their time, so what another clone built
    /// would pass for this one's wherever this one's files are older. They are made new when that is so.
    pub(crate) fn target(&self, name: &str, folders: &[PathBuf]) -> Result<PathBuf> {
        let target = self.folder(&format!("target/{name}"))?;
        let mark = target.join(".clone");
        let clone = project_root().display().to_string();
        if fs::read_to_string(&mark).is_ok_and(|last| last == clone) {
            return Ok(target);
        }
        let now = SystemTime::now();
        for folder in folders {
            for source in sources(folder)? {
                let file = File::options().append(true).open(&source);
                let touched = file.and_then(|file| file.set_modified(now));
                touched.with_context(|| format!("cannot touch {}", source.display()))?;
            }
        }
        fs::write(&mark, clone).with_context(|| format!("cannot write {}", mark.display()))?;
        Ok(target)
    }

    /// The entry `name` for `key`, made by `make` unless it is there complete.
    ///
    /// `make` gets the final path, empty. Other processes wait meanwhile.
    pub(crate) fn entry(
        &self,
        name: &str,
        key: &Key,
        make: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<PathBuf> {
        let path = self.root.join(format!("{name}-{}", key.short()));
        let lock_path = self.folder("locks")?.join(name);
        let lock = File::create(&lock_path)
            .with_context(|| format!("cannot open {}", lock_path.display()))?;
        if lock.try_lock().is_err() {
            say(format!("{name}: waiting for another command that makes it"));
            lock.lock()
                .with_context(|| format!("cannot lock {}", lock_path.display()))?;
        }
        if path.join(COMPLETE).exists() {
            return Ok(path);
        }
        if path.exists() {
            fs::remove_dir_all(&path)
                .with_context(|| format!("cannot remove the unfinished {}", path.display()))?;
        }
        fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        make(&path)?;
        fs::write(path.join(COMPLETE), key.hex())
            .with_context(|| format!("cannot finish {}", path.display()))?;
        Ok(path)
    }
}

/// What went into a cache entry.
#[derive(Debug, Clone)]
pub(crate) struct Key(Sha256);

impl Key {
    /// The key of nothing yet.
    pub(crate) fn new() -> Self {
        Self(Sha256::new())
    }

    /// Adds a named part; parts never run into each other.
    pub(crate) fn part(mut self, name: &str, bytes: &[u8]) -> Self {
        for field in [name.as_bytes(), bytes] {
            self.0.update((field.len() as u64).to_le_bytes());
            self.0.update(field);
        }
        self
    }

    /// Adds the contents of a file under its name.
    pub(crate) fn file(self, path: &Path) -> Result<Self> {
        let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        Ok(self.part(&name, &bytes))
    }

    /// All of it, in hexadecimal.
    pub(crate) fn hex(&self) -> String {
        hex(&self.0.clone().finalize())
    }

    fn short(&self) -> String {
        self.hex()[..16].to_owned()
    }
}

/// Lower-case hexadecimal digits of `bytes`.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The SHA-256 of `bytes` in lower-case hexadecimal.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// The folders of this workspace's crates.
pub(crate) fn members() -> [PathBuf; 2] {
    ["crates", "benches"].map(|folder| project_root().join(folder))
}

/// The root of this clone.
pub(crate) fn project_root() -> PathBuf {
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    manifest
        .ancestors()
        .nth(2)
        .map_or_else(|| manifest.clone(), Path::to_owned)
}

fn non_empty(variable: &str) -> Option<std::ffi::OsString> {
    std::env::var_os(variable).filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_made_once_and_again_after_a_failure() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path());
        let key = Key::new().part("version", b"1");
        let failed = cache.entry("thing", &key, |path| {
            fs::write(path.join("half"), "")?;
            anyhow::bail!("interrupted")
        });
        assert!(failed.is_err());
        let mut made = 0;
        for _ in 0..2 {
            let path = cache
                .entry("thing", &key, |path| {
                    made += 1;
                    assert!(!path.join("half").exists(), "the unfinished entry is gone");
                    Ok(fs::write(path.join("whole"), "")?)
                })
                .unwrap();
            assert!(path.join("whole").exists());
        }
        assert_eq!(made, 1);
    }

    #[test]
    fn another_input_is_another_entry() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path());
        let entry = |key: &Key| cache.entry("thing", key, |_| Ok(())).unwrap();
        assert_ne!(
            entry(&Key::new().part("ab", b"c")),
            entry(&Key::new().part("a", b"bc"))
        );
    }

    #[test]
    fn what_another_clone_built_is_older_than_this_ones_files() {
        let (root, crates) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let cache = Cache::at(root.path());
        let source = crates.path().join("lib.rs");
        fs::write(&source, "").unwrap();
        let old = SystemTime::UNIX_EPOCH;
        let set_old = || {
            let file = File::options().append(true).open(&source).unwrap();
            file.set_modified(old).unwrap();
        };
        let modified = || fs::metadata(&source).unwrap().modified().unwrap();
        let folders = [crates.path().to_owned()];
        set_old();
        let target = cache.target("some", &folders).unwrap();
        assert!(modified() > old);
        // The same clone again: cargo knows itself what is new.
        set_old();
        cache.target("some", &folders).unwrap();
        assert_eq!(modified(), old);
        fs::write(target.join(".clone"), "/another").unwrap();
        cache.target("some", &folders).unwrap();
        assert!(modified() > old);
    }
}
