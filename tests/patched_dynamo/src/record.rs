// SPDX-License-Identifier: Apache-2.0

//! A record: one JSON object a line, its kind first.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::value::RawValue;

/// A record that is being written.
#[derive(Debug)]
pub(crate) struct Record {
    file: BufWriter<File>,
    lines: BTreeMap<&'static str, usize>,
}

/// How many lines of each kind a record has.
#[derive(Debug)]
pub(crate) struct Lines(BTreeMap<&'static str, usize>);

#[derive(Serialize)]
struct Line<'a, T> {
    kind: &'a str,
    what: T,
}

impl Record {
    /// Begins the record in the file `path`.
    pub(crate) fn create(path: &Path) -> Result<Self> {
        let file =
            File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self {
            file: BufWriter::new(file),
            lines: BTreeMap::new(),
        })
    }

    /// Adds one line.
    pub(crate) fn line(&mut self, kind: &'static str, what: impl Serialize) -> Result<()> {
        serde_json::to_writer(&mut self.file, &Line { kind, what })?;
        self.file.write_all(b"\n")?;
        *self.lines.entry(kind).or_default() += 1;
        Ok(())
    }

    /// Adds one line whose content is JSON already; its bytes are kept as they are.
    pub(crate) fn bytes(&mut self, kind: &'static str, json: String) -> Result<()> {
        self.line(kind, RawValue::from_string(json)?)
    }

    /// Ends the record.
    pub(crate) fn finish(mut self) -> Result<Lines> {
        self.file.flush()?;
        Ok(Lines(self.lines))
    }
}

impl fmt::Display for Lines {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kinds: Vec<_> = self
            .0
            .iter()
            .map(|(kind, lines)| format!("{lines} {kind}"))
            .collect();
        formatter.write_str(&kinds.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_counted_by_kind_and_json_keeps_its_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("record");
        let mut record = Record::create(&path).unwrap();
        record.line("choice", 7).unwrap();
        record.line("choice", 8).unwrap();
        record
            .bytes("card", r#"{"b":1.0,  "a":1e2}"#.to_owned())
            .unwrap();
        assert_eq!(record.finish().unwrap().to_string(), "1 card, 2 choice");
        assert_eq!(
            std::fs::read_to_string(path).unwrap(),
            concat!(
                r#"{"kind":"choice","what":7}"#,
                "\n",
                r#"{"kind":"choice","what":8}"#,
                "\n",
                r#"{"kind":"card","what":{"b":1.0,  "a":1e2}}"#,
                "\n"
            )
        );
    }
}
