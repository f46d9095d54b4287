// SPDX-License-Identifier: Apache-2.0

//! Traces from files.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use flate2::read::MultiGzDecoder;
use kvdelta_indexer::BlockSize;
use thiserror::Error;

use super::line::{BadLine, Format, Row};
use super::requests::{Interner, Node, Trace};

/// What gzip begins with.
const GZIP: [u8; 2] = [0x1f, 0x8b];
/// Tokens of a block in Mooncake's traces.
const MOONCAKE_BLOCK: u32 = 512;

/// How a trace is to be read.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Reading {
    /// `None`: as the first line looks.
    pub(crate) format: Option<Format>,
    /// Tokens of a block. `None`: what the lines say, or Mooncake's 512.
    pub(crate) block_size: Option<BlockSize>,
    /// Whether bad lines are left out.
    pub(crate) skip_bad: bool,
}

/// What was read.
#[derive(Debug)]
pub(crate) struct Readout {
    /// The requests.
    pub(crate) trace: Trace,
    /// Lines with a request, good and bad.
    pub(crate) lines: u64,
    /// Those that were left out, and what is wrong with the first of them.
    pub(crate) skipped: u64,
    pub(crate) first_skipped: Option<BadTrace>,
}

/// Why a trace cannot be read.
#[derive(Debug, Error)]
pub(crate) enum BadTrace {
    #[error("cannot read {}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("{}: line {number}", path.display())]
    Line {
        path: PathBuf,
        number: u64,
        source: BadLine,
    },
    #[error("{}: line {number} cannot be read", path.display())]
    Unreadable {
        path: PathBuf,
        number: u64,
        source: io::Error,
    },
    #[error("no requests in {0}")]
    Empty(String),
}

/// Reads files as one trace, each packed by gzip or not. What Mooncake's format tells must be in the order of its
/// times; Dynamo writes a request when it ends, so its records are sorted.
///
/// # Errors
/// [`BadTrace`]; of a bad line only if they are not to be left out.
pub(crate) fn read(paths: &[PathBuf], how: Reading) -> Result<Readout, BadTrace> {
    let mut rows = Rows {
        how,
        size: how.block_size,
        format: how.format,
        first_ms: None,
        last_ms: 0.0,
        kept: Vec::new(),
        nodes: Interner::default(),
        path: Vec::new(),
        trace: None,
        lines: 0,
        skipped: 0,
        first_skipped: None,
    };
    for path in paths {
        let file = File::open(path).and_then(unpacked);
        let mut reader = file.map_err(|source| BadTrace::File {
            path: path.clone(),
            source,
        })?;
        rows.add_file(path, &mut reader)?;
    }
    let names = paths.iter().map(|path| path.display().to_string());
    rows.finish(names.collect::<Vec<_>>().join(", "))
}

fn unpacked(file: File) -> io::Result<Box<dyn BufRead>> {
    let mut reader = BufReader::new(file);
    let is_packed = reader.fill_buf()?.starts_with(&GZIP);
    let reader: Box<dyn Read> = if is_packed {
        Box::new(MultiGzDecoder::new(reader))
    } else {
        Box::new(reader)
    };
    Ok(Box::new(BufReader::new(reader)))
}

struct Rows {
    how: Reading,
    size: Option<BlockSize>,
    format: Option<Format>,
    first_ms: Option<f64>,
    last_ms: f64,
    /// Rows that are sorted at the end.
    kept: Vec<Kept>,
    nodes: Interner,
    path: Vec<Node>,
    trace: Option<Trace>,
    lines: u64,
    skipped: u64,
    first_skipped: Option<BadTrace>,
}

struct Kept {
    at_ms: f64,
    tokens: (u32, u32),
    path: Vec<Node>,
}

impl Rows {
    fn add_file(&mut self, path: &Path, reader: &mut dyn BufRead) -> Result<(), BadTrace> {
        let mut line = String::new();
        for number in 1.. {
            line.clear();
            let read = reader.read_line(&mut line);
            let read = read.map_err(|source| BadTrace::Unreadable {
                path: path.to_owned(),
                number,
                source,
            });
            if read? == 0 {
                break;
            }
            if line.trim().is_empty() {
                continue;
            }
            if let Err(source) = self.add_line(line.trim_end()) {
                let bad = BadTrace::Line {
                    path: path.to_owned(),
                    number,
                    source,
                };
                if !self.how.skip_bad {
                    return Err(bad);
                }
                self.lines += 1;
                self.skipped += 1;
                self.first_skipped.get_or_insert(bad);
            }
        }
        Ok(())
    }

    fn add_line(&mut self, line: &str) -> Result<(), BadLine> {
        let format = *self.format.get_or_insert_with(|| Format::of(line));
        let Some(row) = format.row(line)? else {
            return Ok(());
        };
        let size = match self.size.or(row.block_size) {
            Some(size) => size,
            None => BlockSize::try_from(MOONCAKE_BLOCK)?,
        };
        let tokens = row.tokens(size)?;
        match format {
            Format::Mooncake => self.add_sorted(&row, tokens, size)?,
            Format::Dynamo => {
                self.number(&row, size)?;
                self.kept.push(Kept {
                    at_ms: row.at_ms,
                    tokens,
                    path: self.path.clone(),
                });
            }
        }
        self.size = Some(size);
        self.lines += 1;
        Ok(())
    }

    /// Numbers the whole blocks of a row.
    fn number(&mut self, row: &Row, size: BlockSize) -> Result<(), BadLine> {
        let whole = row.prompt_tokens / u64::from(u32::from(size));
        let whole = usize::try_from(whole).unwrap_or(usize::MAX);
        let names = row.names.get(..whole).unwrap_or(&row.names);
        Ok(self.nodes.path(names, &mut self.path)?)
    }

    fn add_sorted(
        &mut self,
        row: &Row,
        (prompt, output): (u32, u32),
        size: BlockSize,
    ) -> Result<(), BadLine> {
        let (before, at) = (self.last_ms, row.at_ms);
        if before > at {
            return Err(BadLine::Backwards { before, at });
        }
        self.number(row, size)?;
        let since_first = at - *self.first_ms.get_or_insert(at);
        let trace = self.trace.get_or_insert_with(|| Trace::new(size));
        trace.push(millis(since_first), prompt, output, self.path.drain(..));
        self.last_ms = at;
        Ok(())
    }

    fn finish(mut self, names: String) -> Result<Readout, BadTrace> {
        self.kept.sort_by(|a, b| a.at_ms.total_cmp(&b.at_ms));
        let first = self.kept.first().map(|one| one.at_ms).unwrap_or_default();
        if let (Some(size), false) = (self.size, self.kept.is_empty()) {
            let trace = self.trace.get_or_insert_with(|| Trace::new(size));
            for row in self.kept {
                let (prompt, output) = row.tokens;
                trace.push(millis(row.at_ms - first), prompt, output, row.path);
            }
        }
        let trace = self.trace.ok_or(BadTrace::Empty(names))?;
        Ok(Readout {
            trace,
            lines: self.lines,
            skipped: self.skipped,
            first_skipped: self.first_skipped,
        })
    }
}

fn millis(ms: f64) -> Duration {
    Duration::try_from_secs_f64(ms / 1000.0).unwrap_or(Duration::MAX)
}
