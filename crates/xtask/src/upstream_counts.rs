// SPDX-License-Identifier: Apache-2.0

//! What cargo said about upstream's tests, and how two runs compare. Pure.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use crate::report::grouped;

/// Sums of cargo's `test result:` lines.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Counts {
    /// Tests that passed.
    pub(crate) passed: u64,
    /// Tests that failed.
    pub(crate) failed: u64,
    /// Tests that upstream marks as ignored.
    pub(crate) ignored: u64,
    /// Tests that the filters and `--skip` leave out.
    pub(crate) filtered: u64,
}

impl Counts {
    /// Sums the `test result:` lines of `output`, one a test program; `None` without any.
    pub(crate) fn parse(output: &str) -> Option<Self> {
        let mut sum = None;
        for line in output.lines() {
            // A test that prints without a newline may stand before it.
            let Some((_, result)) = line.split_once("test result: ") else {
                continue;
            };
            let counts = Self::of_line(result)?;
            let total: &mut Self = sum.get_or_insert_default();
            total.passed += counts.passed;
            total.failed += counts.failed;
            total.ignored += counts.ignored;
            total.filtered += counts.filtered;
        }
        sum
    }

    /// `ok. 2 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.01s`
    fn of_line(result: &str) -> Option<Self> {
        let (_, counts) = result.split_once(". ")?;
        let mut sum = Self::default();
        for part in counts.split("; ") {
            let (number, what) = part.split_once(' ')?;
            let field = match what {
                "passed" => &mut sum.passed,
                "failed" => &mut sum.failed,
                "ignored" => &mut sum.ignored,
                "filtered out" => &mut sum.filtered,
                _ => continue,
            };
            *field = number.parse().ok()?;
        }
        Some(sum)
    }

    /// `1,046 passed, 2 ignored, 1 filtered`: what is 0 is left out, save `passed`.
    pub(crate) fn shown(self) -> String {
        let mut text = format!("{} passed", grouped(self.passed));
        for (number, what) in [
            (self.failed, "failed"),
            (self.ignored, "ignored"),
            (self.filtered, "filtered"),
        ] {
            if number > 0 {
                let _ = write!(text, ", {} {what}", grouped(number));
            }
        }
        text
    }
}

/// Names of tests, each with how often it is there (several programs may have one of a name).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Names(BTreeMap<String, u64>);

impl Names {
    /// The names in the output of `-- --list`.
    pub(crate) fn parse(output: &str) -> Self {
        let mut names = BTreeMap::new();
        for line in output.lines() {
            if let Some(name) = line.strip_suffix(": test") {
                *names.entry(without_line(name)).or_default() += 1;
            }
        }
        Self(names)
    }

    /// How many tests these are.
    pub(crate) fn count(&self) -> u64 {
        self.0.values().sum()
    }

    /// The names that are here more often than in `other`.
    pub(crate) fn missing_in(&self, other: &Self) -> Vec<String> {
        self.0
            .iter()
            .filter(|(name, count)| other.times(name) < **count)
            .map(|(name, _)| name.clone())
            .collect()
    }

    fn times(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or(0)
    }
}

/// A doc test's name without its line, which every patch may move.
fn without_line(name: &str) -> String {
    match name.split_once(" (line ") {
        Some((item, rest)) => {
            let behind = rest.split_once(')').map_or("", |(_, behind)| behind);
            format!("{item}{behind}")
        }
        None => name.to_owned(),
    }
}

/// The tests that `-- --list` names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Listed {
    /// All of them.
    pub(crate) all: Names,
    /// Those marked as ignored.
    pub(crate) ignored: Names,
}

impl Listed {
    /// What `after` lacks of the tests here: names that are gone, or ignored from now on.
    pub(crate) fn lost_in(&self, after: &Self) -> Vec<String> {
        let gone = self.all.missing_in(&after.all);
        let silenced = after.ignored.missing_in(&self.ignored);
        let mut lost: Vec<String> = gone.iter().map(|name| format!("{name}: gone")).collect();
        lost.extend(
            silenced
                .iter()
                .filter(|name| self.all.times(name) > 0)
                .map(|name| format!("{name}: ignored now")),
        );
        lost
    }
}

/// The names of the tests that failed: the lists below `failures:` in cargo's output.
pub(crate) fn failed_names(output: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut in_list = false;
    for line in output.lines() {
        match line.strip_prefix("    ") {
            Some(name) if in_list => names.push(name.to_owned()),
            _ => in_list = line == "failures:",
        }
    }
    names.sort();
    names
}

/// One run of tests of a crate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Run {
    /// The crate.
    #[serde(rename = "crate")]
    pub(crate) name: String,
    /// The command in Dynamo's repository.
    pub(crate) command: String,
    /// What cargo counted.
    pub(crate) counts: Counts,
    /// Tests that the sources have under these filters.
    pub(crate) listed: u64,
    /// Why the run is not good; empty when it is.
    pub(crate) problems: Vec<String>,
    /// How long building and running took.
    pub(crate) seconds: f64,
}

impl Run {
    /// Why the run is not good: what was noted when it ran, else what its numbers say.
    fn faults(&self) -> Vec<String> {
        if !self.problems.is_empty() {
            return self.problems.clone();
        }
        let Counts {
            passed,
            failed,
            ignored,
            ..
        } = self.counts;
        let mut faults = Vec::new();
        if passed == 0 {
            faults.push("no test passed".to_owned());
        }
        if failed > 0 {
            faults.push(format!("{failed} failed"));
        }
        let ran = u128::from(passed) + u128::from(failed) + u128::from(ignored);
        if ran != u128::from(self.listed) {
            faults.push(format!("{ran} tests counted of {} listed", self.listed));
        }
        faults
    }
}

/// The runs on one state of the sources.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Row {
    /// The last patch that is applied; `None`: none is.
    pub(crate) patch: Option<String>,
    /// SHA-256 of that patch.
    pub(crate) patch_sha256: Option<String>,
    /// The runs, in the order of the table of tests.
    pub(crate) runs: Vec<Run>,
}

impl Row {
    fn sources(&self) -> &str {
        self.patch.as_deref().unwrap_or("before the series")
    }
}

/// Tests of a pinned crate that are not run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LeftOut {
    /// The crate.
    #[serde(rename = "crate")]
    pub(crate) name: String,
    /// Which of its tests.
    pub(crate) tests: String,
    /// Why not.
    pub(crate) reason: String,
}

/// All of it: what `--json` holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Results {
    /// Version of Dynamo.
    pub(crate) dynamo: String,
    /// The states of the sources, in the order of the series.
    pub(crate) rows: Vec<Row>,
    /// What is not run.
    pub(crate) left_out: Vec<LeftOut>,
}

impl Results {
    /// Every problem, with its sources and crate.
    pub(crate) fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        for row in &self.rows {
            for run in &row.runs {
                problems.extend(
                    run.faults()
                        .iter()
                        .map(|problem| format!("{}, {}: {problem}", row.sources(), run.name)),
                );
            }
        }
        problems
    }

    /// The table for people.
    pub(crate) fn table(&self) -> String {
        let width = self
            .rows
            .iter()
            .map(|row| row.sources().len())
            .max()
            .unwrap_or_default();
        let mut text = format!(
            "{:width$}  {:28}  {:>7}  {:>7}  {:>7}  {:>8}  {:>8}\n",
            "sources", "crate", "passed", "failed", "ignored", "filtered", "problems"
        );
        for row in &self.rows {
            for (index, run) in row.runs.iter().enumerate() {
                let sources = if index == 0 { row.sources() } else { "" };
                let _ = writeln!(
                    text,
                    "{sources:width$}  {:28}  {:>7}  {:>7}  {:>7}  {:>8}  {:>8}",
                    run.name,
                    grouped(run.counts.passed),
                    grouped(run.counts.failed),
                    grouped(run.counts.ignored),
                    grouped(run.counts.filtered),
                    run.problems.len()
                );
            }
        }
        for left_out in &self.left_out {
            let _ = writeln!(
                text,
                "not run: {}, {} ({})",
                left_out.name, left_out.tests, left_out.reason
            );
        }
        text
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const OUTPUT: &str = "running 3 tests\ntest a::one ... ok\ntest a::two ... FAILED\n\
        test a::three ... ignored\n\nfailures:\n    a::two\n\n\
        test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 4 filtered out; \
        finished in 0.01s\n\n\
        printed by a testtest result: ok. 1046 passed; 0 failed; 1 ignored; 0 measured; \
        0 filtered out; finished in 2.00s\n";

    #[test]
    fn result_lines_are_summed() {
        let counts = Counts {
            passed: 1047,
            failed: 1,
            ignored: 2,
            filtered: 4,
        };
        assert_eq!(Counts::parse(OUTPUT), Some(counts));
        assert_eq!(
            counts.shown(),
            "1,047 passed, 1 failed, 2 ignored, 4 filtered"
        );
        assert_eq!(Counts::default().shown(), "0 passed");
    }

    #[test]
    fn no_or_an_unreadable_result_line_is_no_count() {
        assert_eq!(Counts::parse("error: could not compile"), None);
        assert_eq!(
            Counts::parse("test result: ok. many passed; 0 failed"),
            None
        );
    }

    #[test]
    fn failed_tests_are_named() {
        assert_eq!(failed_names(OUTPUT), ["a::two"]);
    }

    fn listed(all: &str, ignored: &str) -> Listed {
        Listed {
            all: Names::parse(all),
            ignored: Names::parse(ignored),
        }
    }

    #[test]
    fn a_test_that_is_gone_or_ignored_is_named() {
        let before = listed(
            "a: test\nb: test\nb: test\nc: test\n\n4 tests, 0 benchmarks\n",
            "",
        );
        assert_eq!(before.all.count(), 4);
        assert_eq!(before.lost_in(&before), Vec::<String>::new());
        let after = listed(
            "a: test\nb: test\nc: test\nnew: test\n",
            "c: test\nnew: test\n",
        );
        assert_eq!(before.lost_in(&after), ["b: gone", "c: ignored now"]);
    }

    #[test]
    fn a_doc_test_that_moved_is_still_there() {
        let before = listed("src/lib.rs - f (line 12): test\n", "");
        let after = listed("src/lib.rs - f (line 14): test\n", "");
        assert_eq!(before.lost_in(&after), Vec::<String>::new());
        let compiled = listed("src/lib.rs - f (line 14) - compile: test\n", "");
        assert_eq!(
            before.lost_in(&compiled),
            ["src/lib.rs - f: gone"],
            "a doc test that is only compiled is another one"
        );
    }

    /// Results of a series of one patch.
    pub(crate) fn results(patch: &str, patch_sha256: &str) -> Results {
        let run = |passed, problems: &[&str]| Run {
            name: "dynamo-x".into(),
            command: "cargo test -p dynamo-x".into(),
            counts: Counts {
                passed,
                ignored: 2,
                ..Counts::default()
            },
            listed: passed + 2,
            problems: problems.iter().map(|&problem| problem.into()).collect(),
            seconds: 1.0,
        };
        Results {
            dynamo: "1.6.1".into(),
            rows: vec![
                Row {
                    patch: None,
                    patch_sha256: None,
                    runs: vec![run(1046, &[])],
                },
                Row {
                    patch: Some(patch.into()),
                    patch_sha256: Some(patch_sha256.into()),
                    runs: vec![run(1057, &[])],
                },
            ],
            left_out: vec![LeftOut {
                name: "dynamo-x".into(),
                tests: "y".into(),
                reason: "z".into(),
            }],
        }
    }

    #[test]
    fn the_table_has_a_row_a_state_and_says_what_is_not_run() {
        let table = results("0001-x.patch", "00").table();
        for line in [
            "before the series  dynamo-x                        1,046        0        2         0         0",
            "0001-x.patch       dynamo-x                        1,057        0        2         0         0",
            "not run: dynamo-x, y (z)",
        ] {
            assert!(table.contains(line), "{table}");
        }
    }

    #[test]
    fn a_problem_is_told_with_its_sources_and_crate() {
        let mut results = results("0001-x.patch", "00");
        results.rows[1].runs[0].problems.push("a: gone".into());
        assert_eq!(results.problems(), ["0001-x.patch, dynamo-x: a: gone"]);
    }

    #[test]
    fn numbers_that_cannot_be_of_a_good_run_are_a_problem() {
        for (passed, failed, listed, said) in [
            (0, 0, 2, "no test passed"),
            (5, 1, 8, "1 failed"),
            (5, 0, 8, "7 tests counted of 8 listed"),
            (u64::MAX, 0, 0, "18446744073709551617 tests counted of 0"),
        ] {
            let mut results = results("0001-x.patch", "00");
            let run = &mut results.rows[0].runs[0];
            run.counts.passed = passed;
            run.counts.failed = failed;
            run.listed = listed;
            let problems = results.problems();
            let expected = format!("before the series, dynamo-x: {said}");
            assert!(problems[0].starts_with(&expected), "{problems:?}");
            assert_eq!(problems.len(), 1, "{problems:?}");
        }
    }

    #[test]
    fn results_are_read_back_from_json() {
        let results = results("0001-x.patch", "00");
        let json = serde_json::to_string(&results).unwrap();
        assert_eq!(serde_json::from_str::<Results>(&json).unwrap(), results);
    }
}
