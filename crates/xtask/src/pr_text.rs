// SPDX-License-Identifier: Apache-2.0

//! From the text on top of a patch to the text of its pull request. Pure.

use std::fmt::Write as _;

use anyhow::{Context, Result, bail};

use crate::diff_size::DiffSize;
use crate::phase::Phase;
use crate::upstream_counts::{LeftOut, Results, Row};

/// Titles are shorter than this.
const TITLE_CHARACTERS: usize = 75;
/// Types of Conventional Commits that Dynamo accepts.
const TITLE_TYPES: [&str; 11] = [
    "feat", "fix", "docs", "test", "ci", "refactor", "perf", "chore", "revert", "style", "build",
];
/// Ends the header and begins the remarks.
const SEPARATOR: &str = "---";

/// What stands on top of a patch: the fields of its header and those of its remarks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    /// First line of `Description`: the pull request's title.
    pub(crate) title: String,
    /// The rest of `Description`.
    summary: Vec<Block>,
    /// The phase that `Origin` names.
    pub(crate) phase: Phase,
    start_at: Vec<Block>,
    already_there: Vec<Block>,
    cost: Vec<Block>,
    public_api: Vec<Block>,
    validation: Vec<Block>,
    notes: Vec<Block>,
}

/// A paragraph, or lines that stand as they are.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Block {
    Paragraph(String),
    Verbatim(String),
}

impl Header {
    /// Reads the text above the first `diff --git` of a patch.
    ///
    /// # Errors
    /// A field that is missing, unknown, empty or there twice, or a title not of Dynamo's form.
    pub(crate) fn parse(patch: &str) -> Result<Self> {
        let text = match patch.find("diff --git ") {
            Some(0) => "",
            Some(_) => patch.split("\ndiff --git ").next().unwrap_or_default(),
            None => bail!("no diff in git's format"),
        };
        let lines: Vec<&str> = text.lines().collect();
        let end = lines
            .iter()
            .position(|line| *line == SEPARATOR)
            .with_context(|| format!("no line {SEPARATOR} between header and remarks"))?;
        let mut header = Fields::parse("header", &lines[..end])?;
        let mut remarks = Fields::parse("remarks", &lines[end + 1..])?;
        let mut description = header.required("Description")?.into_iter();
        let title = description.next().unwrap_or_default();
        check_title(&title)?;
        let origin = header.required("Origin")?.join(" ");
        let phase = origin
            .strip_prefix("kvdelta, phase ")
            .with_context(|| format!("Origin is {origin:?}, not \"kvdelta, phase <label>\""))?
            .parse()
            .with_context(|| format!("Origin is {origin:?}"))?;
        header.required("Forwarded")?;
        header.required("Last-Update")?;
        header.finish()?;
        let parsed = Self {
            title,
            summary: blocks(description),
            phase,
            start_at: blocks(remarks.required("Start-At")?),
            already_there: blocks(remarks.required("Already-There")?),
            cost: blocks(remarks.required("Cost")?),
            public_api: blocks(remarks.required("Public-API")?),
            validation: blocks(remarks.optional("Validation")),
            notes: blocks(remarks.optional("Notes")),
        };
        remarks.finish()?;
        if parsed.summary.is_empty() {
            bail!("Description has a title and no text below it");
        }
        Ok(parsed)
    }
}

/// `Name: value` lines; a line that begins with a blank continues the value, ` .` is an empty one.
struct Fields<'a> {
    part: &'static str,
    fields: Vec<(&'a str, Vec<String>)>,
}

impl<'a> Fields<'a> {
    fn parse(part: &'static str, lines: &[&'a str]) -> Result<Self> {
        let mut fields: Vec<(&str, Vec<String>)> = Vec::new();
        for line in lines {
            if line.trim().is_empty() {
                continue;
            }
            if let Some(more) = line.strip_prefix(' ') {
                let (_, value) = fields
                    .last_mut()
                    .with_context(|| format!("{part}: {line:?} continues no field"))?;
                value.push(if more == "." { "" } else { more }.to_owned());
            } else {
                let field = line.split_once(": ").filter(|(name, _)| {
                    name.chars()
                        .all(|letter| letter.is_ascii_alphabetic() || letter == '-')
                });
                let (name, value) = field.with_context(|| {
                    format!(
                        "{part}: {line:?} is neither \"Field: text\" nor begins with a blank; \
                         see docs/development.md, \"Changing a patch\""
                    )
                })?;
                if fields.iter().any(|(there, _)| *there == name) {
                    bail!("{part}: {name} is there twice");
                }
                fields.push((name, vec![value.trim().to_owned()]));
            }
        }
        Ok(Self { part, fields })
    }

    fn optional(&mut self, name: &str) -> Vec<String> {
        let index = self.fields.iter().position(|(there, _)| *there == name);
        index.map_or_else(Vec::new, |index| self.fields.remove(index).1)
    }

    fn required(&mut self, name: &str) -> Result<Vec<String>> {
        let value = self.optional(name);
        if value.iter().all(|line| line.trim().is_empty()) {
            bail!(
                "{}: the field {name} is missing or empty; see docs/development.md, \
                 \"Changing a patch\"",
                self.part
            );
        }
        Ok(value)
    }

    fn finish(self) -> Result<()> {
        match self.fields.first() {
            Some((name, _)) => bail!(
                "{}: unknown field {name}; see docs/development.md, \"Changing a patch\"",
                self.part
            ),
            None => Ok(()),
        }
    }
}

fn check_title(title: &str) -> Result<()> {
    let form = || {
        let (kind, summary) = title.split_once("): ")?;
        let (kind, scope) = kind.split_once('(')?;
        (TITLE_TYPES.contains(&kind) && !scope.is_empty() && !summary.is_empty()).then_some(())
    };
    if form().is_none() {
        bail!(
            "title {title:?} is not `type(scope): summary` with one of the types {}",
            TITLE_TYPES.join(", ")
        );
    }
    let characters = title.chars().count();
    if characters >= TITLE_CHARACTERS {
        bail!(
            "title {title:?} has {characters} characters, allowed are fewer than {TITLE_CHARACTERS}"
        );
    }
    Ok(())
}

/// Joins lines to paragraphs, since GitHub shows every line end. Lines that begin with another
/// blank or with `- ` stand as they are.
fn blocks(lines: impl IntoIterator<Item = String>) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut fresh = true;
    for line in lines {
        if line.trim().is_empty() {
            fresh = true;
            continue;
        }
        let verbatim = line.starts_with(' ') || line.starts_with("- ");
        match blocks.last_mut() {
            Some(Block::Verbatim(text)) if !fresh && verbatim => {
                text.push('\n');
                text.push_str(&line);
            }
            Some(Block::Paragraph(text)) if !fresh && !verbatim => {
                text.push(' ');
                text.push_str(&line);
            }
            _ if verbatim => blocks.push(Block::Verbatim(line)),
            _ => blocks.push(Block::Paragraph(line)),
        }
        fresh = false;
    }
    blocks
}

fn shown(blocks: &[Block]) -> String {
    blocks
        .iter()
        .map(|block| match block {
            Block::Paragraph(text) | Block::Verbatim(text) => text.as_str(),
        })
        .collect::<Vec<_>>()
        .join("\n\n")
}

/// Everything else that the pull request's text tells.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Facts<'a> {
    /// Version and commit of Dynamo.
    pub(crate) base: (&'a str, &'a str),
    /// Size of the patch.
    pub(crate) size: DiffSize,
    /// Lines that it may have outside tests, new crates and docs.
    pub(crate) limit: Option<usize>,
    /// Crates of this clone that come with it.
    pub(crate) new_crates: &'a [String],
    /// The commands of upstream's tests.
    pub(crate) commands: &'a [String],
    /// What those leave out.
    pub(crate) left_out: &'a [LeftOut],
    /// The rows of the run before and after the patch.
    pub(crate) measured: Option<(&'a Row, &'a Row)>,
    /// `Name <mail>`.
    pub(crate) signoff: &'a str,
}

/// The text: the title, an empty line, and the pull request's body.
pub(crate) fn text(header: &Header, facts: &Facts<'_>) -> String {
    let mut text = format!("{}\n", header.title);
    let mut section = |name: &str, body: &str| {
        let _ = write!(text, "\n## {name}\n\n{}\n", body.trim_end());
    };
    section("Summary", &shown(&header.summary));
    section("Where should the reviewer start?", &shown(&header.start_at));
    section("What was there already", &shown(&header.already_there));
    section("Cost", &shown(&header.cost));
    section("Size", &size_text(facts));
    if !header.notes.is_empty() {
        section("Notes", &shown(&header.notes));
    }
    section("Validation", &validation_text(header, facts));
    section(
        "Related Issues",
        "- [ ] Confirmed — no related issue\n\n\
         (or `Relates to #` and the number of the proposal)",
    );
    section("Public API", &shown(&header.public_api));
    let _ = write!(text, "\nSigned-off-by: {}\n", facts.signoff);
    text
}

/// One line on the size of the patch.
pub(crate) fn size_line(size: DiffSize, limit: Option<usize>) -> String {
    let limit = limit.map_or(String::new(), |limit| format!(" (limit {limit})"));
    format!(
        "{} lines outside tests, new crates and docs{limit}: {} added, {} removed, in {} files; \
         tests {} added, {} removed; docs {} added, {} removed",
        size.source.sum(),
        size.source.added,
        size.source.removed,
        size.source_files,
        size.tests.added,
        size.tests.removed,
        size.docs.added,
        size.docs.removed,
    )
}

fn size_text(facts: &Facts<'_>) -> String {
    let mut text = format!("{}.\n", size_line(facts.size, facts.limit));
    for name in facts.new_crates {
        let _ = write!(text, "\nNew crate: `lib/{name}`.\n");
    }
    text
}

fn validation_text(header: &Header, facts: &Facts<'_>) -> String {
    let (version, commit) = facts.base;
    let mut text = format!("Base: v{version} (`{commit}`).\n\n");
    match facts.measured {
        Some((before, after)) => {
            text.push_str(
                "Upstream's tests on the crates of that version, before and after this change; \
                 every test of before is there after it.\n\n| command | before | after |\n|---|---|---|\n",
            );
            for (before, after) in before.runs.iter().zip(&after.runs) {
                let _ = writeln!(
                    text,
                    "| `{}` | {} | {} |",
                    after.command,
                    before.counts.shown(),
                    after.counts.shown()
                );
            }
        }
        None => {
            text.push_str("To run; no results were given to the export:\n\n```bash\n");
            for command in facts.commands {
                let _ = writeln!(text, "{command}");
            }
            text.push_str("```\n");
        }
    }
    if !facts.left_out.is_empty() {
        text.push_str("\nNot run:\n\n");
        for left_out in facts.left_out {
            let _ = writeln!(
                text,
                "- {}, {}: {}",
                left_out.name, left_out.tests, left_out.reason
            );
        }
    }
    if !header.validation.is_empty() {
        let _ = write!(text, "\n{}\n", shown(&header.validation));
    }
    text
}

/// What results must be of.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Expected<'a> {
    /// Version of Dynamo.
    pub(crate) version: &'a str,
    /// The commands of upstream's tests, in the order of the plan.
    pub(crate) commands: &'a [String],
    /// Name and SHA-256 of the patch before; `None` for the first one.
    pub(crate) before: Option<(&'a str, &'a str)>,
    /// Name and SHA-256 of the patch.
    pub(crate) patch: (&'a str, &'a str),
}

/// The rows of `results` before and after a patch.
///
/// # Errors
/// They are not of this version, this patch and these commands, or not every test is good.
pub(crate) fn rows_of<'a>(
    results: &'a Results,
    expected: &Expected<'_>,
) -> Result<(&'a Row, &'a Row)> {
    if results.dynamo != expected.version {
        bail!(
            "they are of Dynamo {:?}, pinned is {}",
            results.dynamo,
            expected.version
        );
    }
    let problems = results.problems();
    if !problems.is_empty() {
        bail!("not every test is as it should be: {}", problems.join("; "));
    }
    let name = expected.patch.0;
    let index = results
        .rows
        .iter()
        .position(|row| row.patch.as_deref() == Some(name))
        .with_context(|| format!("no results of {name}"))?;
    let after = &results.rows[index];
    let before = index
        .checked_sub(1)
        .and_then(|before| results.rows.get(before))
        .filter(|row| row.patch.as_deref() == expected.before.map(|(name, _)| name))
        .with_context(|| format!("no results of the sources before {name}"))?;
    for (row, patch) in [(before, expected.before), (after, Some(expected.patch))] {
        if row.patch_sha256.as_deref() != patch.map(|(_, sha256)| sha256) {
            bail!(
                "they are of another text of {}: run `cargo xtask test --each-patch` again",
                patch.map_or(name, |(name, _)| name)
            );
        }
        let commands: Vec<&str> = row.runs.iter().map(|run| run.command.as_str()).collect();
        if commands != expected.commands {
            bail!(
                "they are of the commands {commands:?}, tests.toml has {:?}",
                expected.commands
            );
        }
    }
    Ok((before, after))
}

/// Checks `Name <mail>`.
pub(crate) fn check_signoff(signoff: &str) -> Result<()> {
    let form = || {
        let (name, mail) = signoff.strip_suffix('>')?.split_once(" <")?;
        let (user, host) = mail.split_once('@')?;
        let odd = |text: &str| text.is_empty() || text.contains(['<', '>', '\n']);
        (!odd(name.trim()) && !odd(user) && !odd(host)).then_some(())
    };
    form().with_context(|| format!("sign-off {signoff:?} is not \"Name <user@host>\""))
}

/// Adds `lib/<name>` to the members of a workspace's manifest, unless it is there.
pub(crate) fn with_member(manifest: &str, name: &str) -> Result<String> {
    let member = format!("\"lib/{name}\"");
    let begin = manifest
        .find("\nmembers = [\n")
        .context("Cargo.toml has no `members = [` on a line of its own")?;
    let end = begin
        + manifest[begin..]
            .find("\n]")
            .context("the list of members has no end")?;
    if manifest[begin..end].contains(&member) {
        return Ok(manifest.to_owned());
    }
    let comma = if manifest[begin..end].trim_end().ends_with([',', '[']) {
        ""
    } else {
        ","
    };
    Ok(format!(
        "{}{comma}\n    {member},{}",
        &manifest[..end],
        &manifest[end..]
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diff_size::Lines;
    use crate::upstream_counts::tests::results;

    const PATCH: &str = "\
Description: feat(kv-router): weigh the cached prefix
 Decode is chosen by load alone,
 so a prefix travels again.
 .
 Two ways:
 - one
 - two
Origin: kvdelta, phase 1
Forwarded: no
Last-Update: 2026-11-29
---
Start-At: lib/x/src/a.rs
Already-There: the decode subtraction
 of the scorer.
Cost: one subscription.
Public-API: adds one field.
Validation: real engines.

diff --git a/lib/x.rs b/lib/x.rs
";

    fn facts<'a>(signoff: &'a str, commands: &'a [String]) -> Facts<'a> {
        Facts {
            base: ("1.6.1", "c0ffee"),
            size: DiffSize {
                source_files: 2,
                source: Lines {
                    added: 100,
                    removed: 9,
                },
                ..DiffSize::default()
            },
            limit: Some(150),
            new_crates: &[],
            commands,
            left_out: &[],
            measured: None,
            signoff,
        }
    }

    #[test]
    fn the_header_becomes_the_sections() {
        let header = Header::parse(PATCH).unwrap();
        assert_eq!(header.phase, Phase::One);
        let commands = ["cargo test -p dynamo-x".to_owned()];
        let text = text(&header, &facts("A B <a@b.c>", &commands));
        assert!(text.starts_with("feat(kv-router): weigh the cached prefix\n\n## Summary\n"));
        assert!(text.ends_with("\nSigned-off-by: A B <a@b.c>\n"));
        for part in [
            "\nDecode is chosen by load alone, so a prefix travels again.\n",
            "\nTwo ways:\n\n- one\n- two\n",
            "\n## Where should the reviewer start?\n\nlib/x/src/a.rs\n",
            "\n## What was there already\n\nthe decode subtraction of the scorer.\n",
            "\n## Cost\n\none subscription.\n",
            "109 lines outside tests, new crates and docs (limit 150): 100 added, 9 removed",
            "no results were given to the export:\n\n```bash\ncargo test -p dynamo-x\n```\n",
            "\nreal engines.\n",
        ] {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
    }

    #[test]
    fn given_results_stand_beside_each_other() {
        let results = results("0001-x.patch", "00");
        let commands = ["cargo test -p dynamo-x".to_owned()];
        let mut facts = facts("A B <a@b.c>", &[]);
        facts.measured = Some(rows_of(&results, &expected(&commands)).unwrap());
        facts.left_out = &results.left_out;
        let text = text(&Header::parse(PATCH).unwrap(), &facts);
        for part in [
            "| `cargo test -p dynamo-x` | 1,046 passed, 2 ignored | 1,057 passed, 2 ignored |\n",
            "- dynamo-x, y: z\n",
        ] {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
        assert!(!text.contains("no results were given"));
    }

    fn expected(commands: &[String]) -> Expected<'_> {
        Expected {
            version: "1.6.1",
            commands,
            before: None,
            patch: ("0001-x.patch", "00"),
        }
    }

    fn results_refused(change: impl FnOnce(&mut Results), said: &str) {
        let mut results = results("0001-x.patch", "00");
        change(&mut results);
        let commands = ["cargo test -p dynamo-x".to_owned()];
        let error = rows_of(&results, &expected(&commands)).unwrap_err();
        assert!(error.to_string().contains(said), "{said}: {error}");
    }

    #[test]
    fn results_of_something_else_or_with_a_problem_are_refused() {
        let after = |results: &mut Results, patch: &str, sha256: &str| {
            results.rows[1].patch = Some(patch.into());
            results.rows[1].patch_sha256 = Some(sha256.into());
        };
        results_refused(
            |results| results.dynamo = "1.6.0".into(),
            "Dynamo \"1.6.0\"",
        );
        results_refused(
            |results| after(results, "0002-y.patch", "00"),
            "no results of 0001-x.patch",
        );
        results_refused(
            |results| after(results, "0001-x.patch", "11"),
            "another text",
        );
        results_refused(|results| drop(results.rows.remove(0)), "sources before");
        results_refused(
            |results| results.rows[0].patch = Some("0000-w.patch".into()),
            "sources before",
        );
        results_refused(
            |results| results.rows[1].runs[0].problems.push("a: gone".into()),
            "a: gone",
        );
    }

    #[test]
    fn results_that_hold_nothing_are_refused() {
        results_refused(
            |results| results.rows.iter_mut().for_each(|row| row.runs.clear()),
            "commands []",
        );
        results_refused(|results| results.rows[0].runs.clear(), "commands []");
        results_refused(
            |results| results.rows[1].runs[0].command = "true".into(),
            "commands [\"true\"]",
        );
        results_refused(
            |results| {
                let run = results.rows[1].runs[0].clone();
                results.rows[1].runs.push(run);
            },
            "tests.toml has",
        );
        results_refused(
            |results| {
                let run = &mut results.rows[1].runs[0];
                (run.counts.passed, run.counts.ignored, run.listed) = (0, 0, 0);
            },
            "no test passed",
        );
    }

    #[test]
    fn a_header_that_is_not_in_form_is_refused_with_the_reason() {
        let long = format!("feat(x): {}", "y".repeat(66));
        for (from, to, said) in [
            (
                "Origin: kvdelta, phase 1",
                "Origin: kvdelta",
                "phase <label>",
            ),
            ("phase 1", "phase 2", "\"kvdelta, phase 2\""),
            ("Cost: one", "Price: one", "Cost is missing"),
            ("Validation:", "Tested:", "unknown field Tested"),
            ("Cost: one subscription.", "Cost: a\nCost: b", "twice"),
            ("Start-At: lib", "Start at lib", "neither"),
            ("Start-At: lib", "Start at: lib", "neither"),
            ("Forwarded: no\n", "", "Forwarded is missing"),
            ("---\n", "", "no line ---"),
            (
                "feat(kv-router): weigh",
                "feature(kv-router): weigh",
                "type(scope)",
            ),
            (
                "feat(kv-router): weigh the cached prefix",
                &long,
                "75 characters",
            ),
        ] {
            let patch = PATCH.replacen(from, to, 1);
            let error = Header::parse(&patch).unwrap_err().to_string();
            assert!(error.contains(said), "{from:?}: {error}");
        }
    }

    #[test]
    fn a_sign_off_needs_name_and_mail() {
        assert!(check_signoff("A B <a@b.c>").is_ok());
        for wrong in ["", "A B", "<a@b.c>", "A <a>", "A <a@b.c> x", " <a@b>"] {
            let error = check_signoff(wrong).unwrap_err().to_string();
            assert!(error.contains(&format!("{wrong:?}")), "{error}");
        }
    }

    #[test]
    fn a_member_is_added_once() {
        let manifest = "[workspace]\nmembers = [\n    \"lib/llm\",\n]\nresolver = \"3\"\n";
        let with = with_member(manifest, "kvdelta-indexer").unwrap();
        assert_eq!(
            with,
            "[workspace]\nmembers = [\n    \"lib/llm\",\n    \"lib/kvdelta-indexer\",\n]\nresolver = \"3\"\n"
        );
        assert_eq!(with_member(&with, "kvdelta-indexer").unwrap(), with);
        assert_eq!(
            with_member(&manifest.replace("llm\",", "llm\""), "kvdelta-indexer").unwrap(),
            with
        );
        assert!(with_member("[package]\n", "x").is_err());
    }
}
