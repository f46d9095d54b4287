// SPDX-License-Identifier: Apache-2.0

//! What was found, and how bad it is.

use serde::Serialize;

/// How a finding bears on the flag, worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Severity {
    /// The flag does not help, or not with this worker.
    Problem,
    /// Something that decides could not be read; it may be a problem.
    Unknown,
    /// The flag helps less than it could, or soon may not.
    Warning,
    /// Good to know.
    Note,
}

/// One thing that was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    pub(crate) severity: Severity,
    /// Stable name of the check.
    pub(crate) code: &'static str,
    /// Workers, frontends or pools that it is about.
    pub(crate) subjects: Vec<String>,
    /// The value that was seen.
    pub(crate) seen: String,
    /// Where the value was read, one a subject.
    pub(crate) sources: Vec<String>,
    /// What to do, with the name of the setting.
    pub(crate) action: String,
}

impl Finding {
    pub(crate) fn new(
        severity: Severity,
        code: &'static str,
        subject: impl Into<String>,
        seen: impl Into<String>,
        source: impl Into<String>,
        action: impl Into<String>,
    ) -> Self {
        Self {
            severity,
            code,
            subjects: vec![subject.into()],
            seen: seen.into(),
            sources: vec![source.into()],
            action: action.into(),
        }
    }
}

/// Makes one finding of those that say the same of several subjects; worst first.
pub(crate) fn merged(findings: Vec<Finding>) -> Vec<Finding> {
    let mut merged: Vec<Finding> = Vec::new();
    for finding in findings {
        let same = merged.iter_mut().find(|other| {
            (other.code, &other.seen, &other.action)
                == (finding.code, &finding.seen, &finding.action)
        });
        match same {
            Some(other) => {
                other.subjects.extend(finding.subjects);
                other.sources.extend(finding.sources);
            }
            None => merged.push(finding),
        }
    }
    merged.sort_by_key(|finding| finding.severity);
    merged
}

/// The command's exit code.
///
/// 0: nothing keeps the flag from helping; 1: problems; 2: no problem seen, but something that
/// decides could not be read.
pub(crate) fn exit_code(findings: &[Finding]) -> u8 {
    match findings.iter().map(|finding| finding.severity).min() {
        Some(Severity::Problem) => 1,
        Some(Severity::Unknown) => 2,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(severity: Severity, subject: &str) -> Finding {
        Finding::new(severity, "code", subject, "seen", subject, "do")
    }

    #[test]
    fn the_worst_finding_decides_the_exit_code() {
        use Severity::{Note, Problem, Unknown, Warning};
        for (severities, expected) in [
            (&[][..], 0),
            (&[Note, Warning], 0),
            (&[Note, Unknown], 2),
            (&[Unknown, Problem], 1),
        ] {
            let findings: Vec<_> = severities.iter().map(|one| finding(*one, "a")).collect();
            assert_eq!(exit_code(&findings), expected, "{severities:?}");
        }
    }

    #[test]
    fn the_same_of_two_workers_is_one_finding() {
        let findings = merged(vec![
            finding(Severity::Note, "a"),
            finding(Severity::Note, "b"),
        ]);
        assert_eq!(findings.len(), 1);
        assert_eq!(findings[0].subjects, ["a", "b"]);
        assert_eq!(findings[0].sources, ["a", "b"]);
    }
}
