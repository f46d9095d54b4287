// SPDX-License-Identifier: Apache-2.0

//! Comparison of records and of lock files.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::upstream::Pins;

/// How much of a line is shown on either side of where it differs.
const SHOWN_CHARS: usize = 160;

/// How many lines of each kind a record has.
pub(super) type Kinds = BTreeMap<String, usize>;

/// The first line that differs between two records.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Difference {
    line: usize,
    left: Option<String>,
    right: Option<String>,
}

/// The first difference of two records, to the byte.
pub(super) fn difference(left: &str, right: &str) -> Option<Difference> {
    if left == right {
        return None;
    }
    let (mut lefts, mut rights) = (left.split_inclusive('\n'), right.split_inclusive('\n'));
    let mut line = 0;
    loop {
        line += 1;
        let (left, right) = (lefts.next(), rights.next());
        if left != right {
            let at = equal_chars(left.unwrap_or_default(), right.unwrap_or_default());
            let around = |text: &str| {
                text.chars()
                    .skip(at.saturating_sub(SHOWN_CHARS))
                    .take(2 * SHOWN_CHARS)
                    .collect()
            };
            return Some(Difference {
                line,
                left: left.map(around),
                right: right.map(around),
            });
        }
        left?;
    }
}

fn equal_chars(left: &str, right: &str) -> usize {
    left.chars()
        .zip(right.chars())
        .take_while(|(left, right)| left == right)
        .count()
}

impl fmt::Display for Difference {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |side: &Option<String>| match side {
            Some(text) => format!("{text:?}"),
            None => "the end of the record".to_owned(),
        };
        write!(
            formatter,
            "line {} differs\nexpected: {}\nfound:    {}",
            self.line,
            shown(&self.left),
            shown(&self.right)
        )
    }
}

#[derive(Deserialize)]
struct Line {
    kind: String,
}

fn kind(line: &str) -> Result<String> {
    let parsed: Line = serde_json::from_str(line)
        .with_context(|| format!("not a line of a record: {line:.200}"))?;
    Ok(parsed.kind)
}

/// Counts the lines of a record by kind.
pub(super) fn kinds(record: &str) -> Result<Kinds> {
    let mut kinds = Kinds::new();
    for line in record.lines() {
        *kinds.entry(kind(line)?).or_default() += 1;
    }
    Ok(kinds)
}

/// The kinds whose lines, taken by themselves, are not the same in both records.
pub(super) fn kinds_that_differ(left: &str, right: &str) -> Result<BTreeSet<String>> {
    let by_kind = |record: &str| {
        let mut lines: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for line in record.lines() {
            lines.entry(kind(line)?).or_default().push(line.to_owned());
        }
        anyhow::Ok(lines)
    };
    let (left, right) = (by_kind(left)?, by_kind(right)?);
    Ok(left
        .keys()
        .chain(right.keys())
        .filter(|kind| left.get(*kind) != right.get(*kind))
        .cloned()
        .collect())
}

/// Refuses a record that has too little in it to show anything.
pub(super) fn enough(kinds: &Kinds, least: &[(&str, usize)]) -> Result<()> {
    for (kind, least) in least {
        let lines = kinds.get(*kind).copied().unwrap_or_default();
        ensure!(
            lines >= *least,
            "the record has {lines} lines of {kind}, at least {least} are needed"
        );
    }
    Ok(())
}

/// Counts as text.
pub(super) fn listed(kinds: &Kinds) -> String {
    let kinds: Vec<_> = kinds
        .iter()
        .map(|(kind, lines)| format!("{lines} {kind}"))
        .collect();
    kinds.join(", ")
}

/// The lock file `registry` without sources and checksums of the pinned crates.
///
/// # Errors
/// A pinned crate that is not in the lock file with the pinned checksum.
pub(super) fn lock_of_patched(registry: &str, pins: &Pins) -> Result<String> {
    let mut patched = registry.to_owned();
    for pin in &pins.crates {
        let head = format!("name = \"{}\"\nversion = \"{}\"\n", pin.name, pins.version);
        let checksum = format!("checksum = \"{}\"\n", pin.sha256);
        let found = patched.split_once(&head).and_then(|(before, after)| {
            let (source, rest) = after.split_once('\n')?;
            let rest = rest.strip_prefix(&checksum)?;
            source
                .starts_with("source = ")
                .then(|| format!("{before}{head}{rest}"))
        });
        patched = found.with_context(|| {
            format!(
                "tests/patched_dynamo/Cargo.lock has no {} {} with the checksum of pins.toml",
                pin.name, pins.version
            )
        })?;
    }
    Ok(patched)
}

#[derive(Deserialize)]
struct Lock {
    package: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    version: String,
}

/// What the lock file `lock` has in a version that none of `others` has.
pub(super) fn other_versions(lock: &str, others: &[&str]) -> Result<Vec<String>> {
    let packages = |lock: &str| {
        let lock: Lock = toml::from_str(lock).context("not a lock file of cargo")?;
        anyhow::Ok(
            lock.package
                .into_iter()
                .map(|package| format!("{} {}", package.name, package.version))
                .collect::<BTreeSet<_>>(),
        )
    };
    let mut left = packages(lock)?;
    for other in others {
        left = left.difference(&packages(other)?).cloned().collect();
    }
    Ok(left.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::upstream::tests::pins;

    const RECORD: &str = "{\"kind\":\"choice\",\"what\":1}\n{\"kind\":\"event\",\"what\":2}\n";

    #[test]
    fn equal_records_have_no_difference_and_others_show_where_it_is() {
        assert_eq!(difference(RECORD, RECORD), None);
        let long = "x".repeat(1000);
        let other = RECORD.replace("\"what\":2", &format!("\"what\":3,\"{long}\":0"));
        let shown = difference(RECORD, &other).unwrap().to_string();
        assert!(shown.contains("line 2"), "{shown}");
        assert!(shown.contains("what") && shown.len() < 1000, "{shown}");
        let shorter = RECORD.lines().next().unwrap();
        let shown = difference(RECORD, &format!("{shorter}\n"))
            .unwrap()
            .to_string();
        assert!(shown.contains("end of the record"), "{shown}");
        // To the byte: a last line without its end is another.
        assert!(difference(RECORD, RECORD.trim_end()).is_some());
    }

    #[test]
    fn lines_count_by_kind_and_too_few_are_refused() {
        let kinds = kinds(RECORD).unwrap();
        assert_eq!(listed(&kinds), "1 choice, 1 event");
        assert!(enough(&kinds, &[("choice", 1)]).is_ok());
        for (least, named) in [
            (("choice", 2), "1 lines of choice"),
            (("card", 1), "0 lines"),
        ] {
            let error = enough(&kinds, &[least]).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
        assert!(super::kinds("no record\n").is_err());
    }

    #[test]
    fn kinds_differ_by_their_own_lines_alone() {
        let moved = "{\"kind\":\"event\",\"what\":2}\n{\"kind\":\"choice\",\"what\":9}\n";
        assert_eq!(
            kinds_that_differ(RECORD, moved).unwrap(),
            BTreeSet::from(["choice".to_owned()])
        );
        assert_eq!(kinds_that_differ(RECORD, "").unwrap().len(), 2);
    }

    const LOCK: &str = "version = 4\n\n[[package]]\nname = \"dynamo-x\"\nversion = \"1.6.1\"\n\
        source = \"registry+somewhere\"\nchecksum = \"00ff\"\ndependencies = [\n \"y\",\n]\n\n\
        [[package]]\nname = \"y\"\nversion = \"2.0.0\"\nsource = \"registry+somewhere\"\n\
        checksum = \"11\"\n";

    #[test]
    fn the_lock_of_the_patched_crates_lacks_their_sources_and_nothing_else() {
        let patched = lock_of_patched(LOCK, &pins("00ff")).unwrap();
        assert_eq!(
            patched,
            LOCK.replacen(
                "source = \"registry+somewhere\"\nchecksum = \"00ff\"\n",
                "",
                1
            )
        );
        let error = lock_of_patched(LOCK, &pins("00fe")).unwrap_err();
        assert!(error.to_string().contains("dynamo-x 1.6.1"), "{error}");
    }

    #[test]
    fn another_version_is_found_and_an_addition_is_not_one() {
        let added = format!("{LOCK}\n[[package]]\nname = \"z\"\nversion = \"1.0.0\"\n");
        assert!(other_versions(LOCK, &[&added]).unwrap().is_empty());
        assert_eq!(other_versions(&added, &[LOCK]).unwrap(), ["z 1.0.0"]);
        assert!(other_versions(&added, &[LOCK, &added]).unwrap().is_empty());
        let moved = LOCK.replace("2.0.0", "2.0.1");
        assert_eq!(other_versions(LOCK, &[&moved]).unwrap(), ["y 2.0.0"]);
    }
}
