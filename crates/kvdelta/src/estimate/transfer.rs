// SPDX-License-Identifier: Apache-2.0

//! What of a prompt travels, and how long.

use std::ops::RangeInclusive;

use thiserror::Error;

use super::model::{ModelError, Shape};
use super::work::Speed;

/// Longest prompt; the crossover looks at each of its blocks.
pub(crate) const MAX_PROMPT_TOKENS: u64 = 1 << 24;

/// Tokens of the largest block.
pub(crate) const MAX_BLOCK_TOKENS: u64 = 1 << 20;

/// A request that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum RequestError {
    #[error("a prompt has 1 to {MAX_PROMPT_TOKENS} tokens, not {0}")]
    Prompt(u64),
    #[error("a block has 1 to {MAX_BLOCK_TOKENS} tokens, not {0}")]
    Block(u64),
    #[error("{cached} cached tokens are more than the prompt's {prompt}")]
    Cached { cached: u64, prompt: u64 },
}

/// A prompt, and what of it D holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Request {
    prompt_tokens: u64,
    block_tokens: u64,
    overlap_blocks: u64,
}

impl Request {
    /// Of `cached_tokens` whole blocks count, and never the last token: a D computes that one.
    pub(crate) fn new(
        prompt_tokens: u64,
        cached_tokens: u64,
        block_tokens: u64,
    ) -> Result<Self, RequestError> {
        if !(1..=MAX_PROMPT_TOKENS).contains(&prompt_tokens) {
            return Err(RequestError::Prompt(prompt_tokens));
        }
        if !(1..=MAX_BLOCK_TOKENS).contains(&block_tokens) {
            return Err(RequestError::Block(block_tokens));
        }
        if cached_tokens > prompt_tokens {
            return Err(RequestError::Cached {
                cached: cached_tokens,
                prompt: prompt_tokens,
            });
        }
        Ok(Self {
            prompt_tokens,
            block_tokens,
            overlap_blocks: cached_tokens.min(prompt_tokens - 1) / block_tokens,
        })
    }

    pub(crate) fn prompt_tokens(&self) -> u64 {
        self.prompt_tokens
    }

    pub(crate) fn block_tokens(&self) -> u64 {
        self.block_tokens
    }

    /// Blocks of the prompt, the last one perhaps not full.
    pub(crate) fn prompt_blocks(&self) -> u64 {
        self.prompt_tokens.div_ceil(self.block_tokens)
    }

    pub(crate) fn overlap_blocks(&self) -> u64 {
        self.overlap_blocks
    }

    pub(crate) fn overlap_tokens(&self) -> u64 {
        self.overlap_blocks * self.block_tokens
    }

    /// Blocks that D lacks: at least one.
    pub(crate) fn delta_blocks(&self) -> u64 {
        self.prompt_blocks() - self.overlap_blocks
    }

    /// Tokens that D lacks.
    pub(crate) fn missing_tokens(&self) -> u64 {
        self.prompt_tokens - self.overlap_tokens()
    }

    /// The same prompt with each overlap that there can be.
    fn overlaps(self) -> impl Iterator<Item = Self> {
        (0..=(self.prompt_tokens - 1) / self.block_tokens).map(move |overlap_blocks| Self {
            overlap_blocks,
            ..self
        })
    }
}

/// Bytes of a request on one rank, or on all ranks of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// The whole prompt.
    pub(crate) full_bytes: u64,
    /// What D lacks.
    pub(crate) delta_bytes: u64,
    /// What P keeps until it is read, where the claim let it release the rest. Of layers with a
    /// window it keeps the whole window.
    pub(crate) kept_bytes: u64,
}

impl Sizes {
    /// On one of `tp` ranks.
    ///
    /// Of layers with a window as many blocks count as vLLM's connectors exchange: those of the
    /// window and one more (`blocks_per_sw` in its NIXL scheduler).
    pub(crate) fn a_rank(shape: &Shape, tp: u64, request: &Request) -> Result<Self, ModelError> {
        // Checks that nothing below leaves 64 bits.
        shape.token_bytes(tp)?;
        let layer_block = shape.layer_token_bytes(tp)? * request.block_tokens;
        let mut sizes = Self {
            full_bytes: 0,
            delta_bytes: 0,
            kept_bytes: 0,
        };
        for layers in shape.layers() {
            let (full, delta) = (request.prompt_blocks(), request.delta_blocks());
            let (full, delta, kept) = match layers.window_tokens {
                None => (full, delta, delta),
                Some(window) => {
                    let most = window.div_ceil(request.block_tokens).saturating_add(1);
                    (full.min(most), delta.min(most), full.min(most))
                }
            };
            let block = layer_block * layers.count;
            sizes.full_bytes += full * block;
            sizes.delta_bytes += delta * block;
            sizes.kept_bytes += kept * block;
        }
        Ok(sizes)
    }

    /// On all `tp` ranks: what a D of that TP reads, copies with it, or a P holds.
    pub(crate) fn in_all(shape: &Shape, tp: u64, request: &Request) -> Result<Self, ModelError> {
        let rank = Self::a_rank(shape, tp, request)?;
        Ok(Self {
            full_bytes: rank.full_bytes * tp,
            delta_bytes: rank.delta_bytes * tp,
            kept_bytes: rank.kept_bytes * tp,
        })
    }
}

/// What a transfer goes over.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Link {
    /// What one transfer gets of it, in 10^9 bits a second.
    pub(crate) gbit_per_second: f64,
    /// What each transfer takes beside its bytes.
    pub(crate) overhead_seconds: f64,
}

impl Link {
    pub(crate) fn seconds(&self, bytes: u64) -> f64 {
        self.overhead_seconds + bytes as f64 * 8.0 / (self.gbit_per_second * 1e9)
    }
}

/// The rate from which on a transfer of so many bytes takes no longer than `seconds`.
///
/// `None`: the overhead alone does.
pub(crate) fn equal_gbit_per_second(bytes: u64, seconds: f64, overhead: f64) -> Option<f64> {
    let left = seconds - overhead;
    (left > 0.0).then(|| bytes as f64 * 8.0 / (left * 1e9))
}

/// Cached tokens, in whole blocks, with which D has the delta sooner than it could compute it.
pub(crate) fn delta_wins(
    shape: &Shape,
    tp: u64,
    request: &Request,
    link: &Link,
    speed: &Speed,
) -> Result<Vec<RangeInclusive<u64>>, ModelError> {
    let mut ranges: Vec<RangeInclusive<u64>> = Vec::new();
    let mut open = false;
    for request in request.overlaps() {
        let delta = Sizes::in_all(shape, tp, &request)?.delta_bytes;
        let (tokens, prompt) = (request.overlap_tokens(), request.prompt_tokens);
        let wins = link.seconds(delta) < speed.seconds(tokens, prompt);
        match ranges.last_mut().filter(|_| open && wins) {
            Some(range) => *range = *range.start()..=tokens,
            None if wins => ranges.push(tokens..=tokens),
            None => {}
        }
        open = wins;
    }
    Ok(ranges)
}

#[cfg(test)]
mod tests;
