// SPDX-License-Identifier: Apache-2.0

//! Dynamo's file back end of discovery: a folder a bucket, a file a record.
//!
//! As `dynamo-runtime` writes it (`src/storage/kv/file.rs`); the owner touches its files.

use std::fs::{self, File};
use std::path::Path;
use std::time::SystemTime;

use anyhow::{Context, Result, bail};

use super::discovery::{BUCKETS, Entry};
use super::limit;

/// Files that Dynamo is about to rename.
const TEMPORARY: &str = ".tmp_";

/// Reads the records below `root`.
///
/// # Errors
/// `root` is no folder that can be read. Files that vanish meanwhile are no error.
pub(crate) fn read(root: &Path, now: SystemTime) -> Result<Vec<Entry>> {
    if !root.is_dir() {
        bail!("{} is not a folder", root.display());
    }
    let mut entries = Vec::new();
    for bucket in BUCKETS {
        let folder = root.join(bucket);
        if !folder.exists() {
            continue;
        }
        let files =
            fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?;
        for file in files {
            let path = file
                .with_context(|| format!("cannot read {}", folder.display()))?
                .path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with(TEMPORARY) || !path.is_file() {
                continue;
            }
            let file = match File::open(&path) {
                Ok(file) => file,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                Err(error) => {
                    return Err(error).with_context(|| format!("cannot read {}", path.display()));
                }
            };
            let value =
                limit::read(file).with_context(|| format!("cannot read {}", path.display()))?;
            let touched = path.metadata().and_then(|metadata| metadata.modified());
            let age = touched
                .ok()
                .and_then(|touched| now.duration_since(touched).ok());
            entries.push(Entry {
                key: path.display().to_string(),
                value,
                age_seconds: age.map(|age| age.as_secs()),
            });
        }
    }
    entries.sort_by(|a, b| a.key.cmp(&b.key));
    Ok(entries)
}
