// SPDX-License-Identifier: Apache-2.0

//! One line of a trace, in the formats that are understood.

use kvdelta_indexer::{BadBlockSize, BlockSize};
use serde::Deserialize;
use serde_json::Value;
use thiserror::Error;

use super::requests::TooLarge;

/// How a trace is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// Mooncake's: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`.
    Mooncake,
    /// Dynamo's own request trace, `dynamo.request.trace.v1`.
    Dynamo,
}

/// The schema of Dynamo's records that is understood.
const SCHEMA: &str = "dynamo.request.trace.v1";

/// A request as its line tells it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Row {
    /// Milliseconds, from wherever the trace counts.
    pub(crate) at_ms: f64,
    pub(crate) prompt_tokens: u64,
    pub(crate) output_tokens: u64,
    /// A name for each block, the last one begun among them.
    pub(crate) names: Vec<u64>,
    /// Tokens of a block, where the line says it.
    pub(crate) block_size: Option<BlockSize>,
}

/// What is wrong with a line.
#[derive(Debug, Error)]
pub(crate) enum BadLine {
    #[error("not a request of the {format:?} format: {error}")]
    Json { format: Format, error: String },
    #[error(
        "a prompt of {tokens} tokens is {blocks} blocks of {size} tokens, but the line has {names} hashes; \
         is the block size right?"
    )]
    Lengths {
        tokens: u64,
        blocks: u64,
        size: usize,
        names: usize,
    },
    #[error("time goes back from {before} ms to {at} ms")]
    Backwards { before: f64, at: f64 },
    #[error("{0} ms is no time of a request")]
    Time(f64),
    #[error("the prompt has no tokens")]
    Empty,
    #[error("the schema is {0}, not {SCHEMA}")]
    Schema(String),
    #[error("a request_end without {0}")]
    Lacks(&'static str),
    #[error("event_type {0} is not known")]
    Event(String),
    #[error("the line's blocks have {line} tokens, not {wanted}")]
    BlockSize { line: usize, wanted: usize },
    #[error(transparent)]
    NoBlockSize(#[from] BadBlockSize),
    #[error(transparent)]
    TooLarge(#[from] TooLarge),
}

#[derive(Deserialize)]
struct Mooncake {
    #[serde(alias = "created_time")]
    timestamp: f64,
    #[serde(alias = "input_tokens")]
    input_length: u64,
    #[serde(alias = "output_tokens")]
    output_length: u64,
    hash_ids: Vec<u64>,
}

#[derive(Deserialize)]
struct Record {
    schema: String,
    event_type: String,
    event_time_unix_ms: u64,
    request: Option<Metrics>,
}

#[derive(Deserialize)]
struct Metrics {
    output_tokens: Option<u64>,
    request_received_ms: Option<u64>,
    total_time_ms: Option<f64>,
    replay: Option<Hashes>,
}

#[derive(Deserialize)]
struct Hashes {
    trace_block_size: u32,
    input_length: u64,
    input_sequence_hashes: Vec<u64>,
}

impl Format {
    /// What the first line of a trace looks like.
    pub(crate) fn of(line: &str) -> Self {
        let value = serde_json::from_str(line).unwrap_or(Value::Null);
        let is_dynamo = value.get("schema").is_some() || value.get("event").is_some();
        if is_dynamo {
            Self::Dynamo
        } else {
            Self::Mooncake
        }
    }

    /// Reads a line; `None`: it is of no request, as those of tools and payloads in Dynamo's traces.
    ///
    /// # Errors
    /// [`BadLine`].
    pub(crate) fn row(self, line: &str) -> Result<Option<Row>, BadLine> {
        match self {
            Self::Mooncake => {
                let line: Mooncake = serde_json::from_str(line).map_err(|e| self.bad(&e))?;
                Ok(Some(Row {
                    at_ms: line.timestamp,
                    prompt_tokens: line.input_length,
                    output_tokens: line.output_length,
                    names: line.hash_ids,
                    block_size: None,
                }))
            }
            Self::Dynamo => self.record(line),
        }
    }

    fn record(self, line: &str) -> Result<Option<Row>, BadLine> {
        let mut value: Value = serde_json::from_str(line).map_err(|e| self.bad(&e))?;
        // Dynamo's sinks to other systems wrap the record.
        let (value, place) = match value.get_mut("event") {
            Some(event) => (event.take(), "in `event`"),
            None => (value, "in the line, which has no `event`"),
        };
        let record: Record = serde_json::from_value(value).map_err(|error| BadLine::Json {
            format: self,
            error: format!("{error} {place}"),
        })?;
        if record.schema != SCHEMA {
            return Err(BadLine::Schema(record.schema));
        }
        match record.event_type.as_str() {
            "request_end" => {}
            "request_payload" | "tool_start" | "tool_end" | "tool_error" => return Ok(None),
            _ => return Err(BadLine::Event(record.event_type)),
        }
        let request = record.request.ok_or(BadLine::Lacks("request"))?;
        let hashes = request.replay.ok_or(BadLine::Lacks("request.replay"))?;
        let output_tokens = request.output_tokens;
        // As Dynamo's own loader: where the start is not told it is the end less the time taken.
        let at_ms = match request.request_received_ms {
            Some(received) => received as f64,
            None => record.event_time_unix_ms as f64 - request.total_time_ms.unwrap_or(0.0),
        };
        Ok(Some(Row {
            at_ms,
            prompt_tokens: hashes.input_length,
            output_tokens: output_tokens.ok_or(BadLine::Lacks("request.output_tokens"))?,
            names: hashes.input_sequence_hashes,
            block_size: Some(BlockSize::try_from(hashes.trace_block_size)?),
        }))
    }

    fn bad(self, error: &serde_json::Error) -> BadLine {
        let error = error.to_string();
        // Its line is that of the one line.
        let error = match error.rsplit_once(" at line 1 column ") {
            Some((what, "0")) => what.to_owned(),
            Some((what, column)) => format!("{what} at column {column}"),
            None => error,
        };
        BadLine::Json {
            format: self,
            error,
        }
    }
}

impl Row {
    /// The tokens of prompt and answer, if the line makes sense by itself.
    ///
    /// # Errors
    /// [`BadLine`].
    pub(crate) fn tokens(&self, size: BlockSize) -> Result<(u32, u32), BadLine> {
        let number = |tokens| u32::try_from(tokens).map_err(|_| TooLarge::Tokens(tokens));
        if !(0.0..=f64::MAX).contains(&self.at_ms) {
            return Err(BadLine::Time(self.at_ms));
        }
        if self.prompt_tokens == 0 {
            return Err(BadLine::Empty);
        }
        if let Some(line) = self.block_size.filter(|line| *line != size) {
            let (line, wanted) = (line.tokens(), size.tokens());
            return Err(BadLine::BlockSize { line, wanted });
        }
        let blocks = self.prompt_tokens.div_ceil(u32::from(size).into());
        if u64::try_from(self.names.len()) != Ok(blocks) {
            return Err(BadLine::Lengths {
                tokens: self.prompt_tokens,
                blocks,
                size: size.tokens(),
                names: self.names.len(),
            });
        }
        Ok((number(self.prompt_tokens)?, number(self.output_tokens)?))
    }
}
