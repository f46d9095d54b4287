// SPDX-License-Identifier: Apache-2.0

//! Claims on a mock fleet: the tests of `tests/patched_dynamo/tests/claims`, on the patched crates.

use anyhow::Result;

use crate::cache::Cache;
use crate::command;
use crate::unchanged;

/// Builds the tests in the recorder's build folder and runs them.
pub(crate) fn check(cache: &Cache) -> Result<()> {
    let mut tests = unchanged::patched_tests(cache)?;
    tests.args(["--quiet", "--test", "claims", "--"]);
    // A fleet watches its files with some 25 inotify instances, of which a user has 128.
    tests.arg("--test-threads=2");
    command::shown_run(tests)
}
