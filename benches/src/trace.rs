// SPDX-License-Identifier: Apache-2.0

//! Request traces of Mooncake's FAST'25 release.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use flate2::read::MultiGzDecoder;
use serde::Deserialize;

/// What a trace asks for.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// The prompts, each by its ids of 512 tokens; equal ids have equal prefixes.
    pub requests: Vec<Vec<u32>>,
}

#[derive(Deserialize)]
struct Request {
    hash_ids: Vec<u32>,
}

impl Trace {
    /// Reads JSON lines, compressed by gzip if the name says so.
    pub fn read(path: &Path) -> Result<Self> {
        let shown = path.display();
        let file = File::open(path).with_context(|| format!("cannot read the trace {shown}"))?;
        let reader: Box<dyn Read> = if path.extension().is_some_and(|ending| ending == "gz") {
            Box::new(MultiGzDecoder::new(file))
        } else {
            Box::new(file)
        };
        let mut requests = Vec::new();
        for (number, line) in BufReader::new(reader).lines().enumerate() {
            let line = line.with_context(|| format!("{shown}: line {}", number + 1))?;
            if line.trim().is_empty() {
                continue;
            }
            let request: Request = serde_json::from_str(&line)
                .with_context(|| format!("{shown}: line {}", number + 1))?;
            requests.push(request.hash_ids);
        }
        ensure!(!requests.is_empty(), "{shown}: no requests");
        Ok(Self { requests })
    }

    /// Its first `requests` requests.
    pub fn first(&self, requests: usize) -> Self {
        let count = requests.min(self.requests.len());
        Self {
            requests: self.requests[..count].to_vec(),
        }
    }

    /// How many requests, run how often, come to about `ids` ids.
    pub fn with_ids(&self, ids: usize) -> (usize, usize) {
        let all: usize = self.requests.iter().map(Vec::len).sum();
        let passes = ids.div_ceil(all.max(1)).max(1);
        let mut left = ids / passes;
        let fits = self.requests.iter().take_while(|request| {
            let fits = left > 0;
            left = left.saturating_sub(request.len());
            fits
        });
        (fits.count(), passes)
    }
}
