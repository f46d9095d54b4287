// SPDX-License-Identifier: Apache-2.0

//! Where each request went, as JSON lines: written, and read to follow.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write as _};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::sim::Chosen;

/// What is read of a line. Others may have written it, with more in it.
#[derive(Deserialize)]
struct Line {
    decode: usize,
}

/// The decode workers that the lines of a file name.
///
/// # Errors
/// The file cannot be read, a line names none of `decode` workers, or there are not as many lines as `requests`.
pub(crate) fn read(path: &Path, requests: usize, decode: usize) -> Result<Vec<usize>> {
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let lines = text.lines().zip(1..).map(|(line, number)| {
        let place = || format!("{}: line {number}", path.display());
        let line: Line = serde_json::from_str(line).with_context(place)?;
        ensure!(
            line.decode < decode,
            "{}: there is no decode worker {}, they are 0 to {}",
            place(),
            line.decode,
            decode.saturating_sub(1)
        );
        Ok(line.decode)
    });
    let chosen = lines.collect::<Result<Vec<usize>>>()?;
    ensure!(
        chosen.len() == requests,
        "{} has {} lines, the trace {requests} requests",
        path.display(),
        chosen.len()
    );
    Ok(chosen)
}

/// Writes a line for each request.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn write(path: &Path, chosen: &[Chosen]) -> Result<()> {
    let lines = || -> io::Result<()> {
        let mut file = BufWriter::new(File::create(path)?);
        for one in chosen {
            serde_json::to_writer(&mut file, one)?;
            file.write_all(b"\n")?;
        }
        file.flush()
    };
    lines().with_context(|| format!("cannot write {}", path.display()))
}
