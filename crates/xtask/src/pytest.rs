// SPDX-License-Identifier: Apache-2.0

//! pytest, with what it skips in plain sight.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::cache::Cache;
use crate::command;
use crate::env;
use crate::fleet::engine_environment;
use crate::progress::say;

/// Runs the tests in `files` with `python`, which has the folders of `path` before its own packages; pytest is told
/// `options` as well, and the tests have `variables` in their environment.
pub(crate) fn run(
    cache: &Cache,
    python: &Path,
    path: &[&Path],
    options: &[&str],
    folder: &Path,
    files: &[PathBuf],
    variables: &[(&str, &OsStr)],
) -> Result<()> {
    let scratch = tempfile::tempdir()?;
    let results = scratch.path().join("results.xml");
    let installed = env::pytest(cache)?;
    let mut pytest = Command::new(python);
    pytest
        .args(["-m", "pytest", "--quiet", "-rs", "-p", "no:cacheprovider"])
        .arg("--junit-xml")
        .arg(&results)
        .args(options)
        .args(files)
        .current_dir(folder)
        .env(
            "PYTHONPATH",
            std::env::join_paths(path.iter().copied().chain([installed.as_path()]))?,
        )
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .envs(engine_environment())
        .envs(variables.iter().copied());
    command::shown_run(pytest)?;
    let text = fs::read_to_string(&results).context("pytest wrote no results")?;
    let skipped = skipped(&text).context("pytest's results do not say what was skipped")?;
    if skipped > 0 {
        say(format!("skipped: {skipped} tests, for the reasons above"));
    }
    Ok(())
}

/// The number of skipped tests in a JUnit file with one suite.
fn skipped(results: &str) -> Option<u64> {
    let (_, suite) = results.split_once("<testsuite ")?;
    let (_, rest) = suite.split_once(" skipped=\"")?;
    rest.split('"').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skipped_tests_are_counted() {
        let results = "<?xml version=\"1.0\"?><testsuites name=\"pytest tests\"><testsuite \
            name=\"pytest\" errors=\"0\" failures=\"1\" skipped=\"12\" tests=\"20\">\
            <testcase name=\"a\"><skipped/></testcase></testsuite></testsuites>";
        assert_eq!(skipped(results), Some(12));
        assert_eq!(skipped("<testsuites></testsuites>"), None);
    }
}
