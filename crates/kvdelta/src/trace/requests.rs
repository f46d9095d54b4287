// SPDX-License-Identifier: Apache-2.0

//! A trace in memory: every whole block of every prompt is a number, equal where the prefixes are equal.

use std::time::Duration;

use kvdelta_indexer::BlockSize;
use rustc_hash::FxHashMap;
use thiserror::Error;

/// A prefix: a block together with all blocks before it. Numbers of a trace count from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Node(pub(crate) u32);

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// When it comes, from the first one on.
    pub(crate) at: Duration,
    /// Tokens of its prompt, at least 1.
    pub(crate) prompt_tokens: u32,
    /// Tokens of its answer.
    pub(crate) output_tokens: u32,
    /// Where its blocks begin in the trace's list, and how many are whole.
    start: usize,
    whole_blocks: usize,
}

/// Requests in the order of their times.
#[derive(Clone, Debug)]
pub(crate) struct Trace {
    block_size: BlockSize,
    requests: Vec<Request>,
    nodes: Vec<Node>,
    distinct: u32,
}

/// A trace is larger than its numbers reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum TooLarge {
    /// Of one request.
    #[error("{0} tokens are more than a request can have here ({max})", max = u32::MAX)]
    Tokens(u64),
    /// Of all of them.
    #[error("the trace has more than {max} different blocks", max = u32::MAX)]
    Blocks,
}

impl Trace {
    /// A trace without requests.
    pub(crate) const fn new(block_size: BlockSize) -> Self {
        Self {
            block_size,
            requests: Vec::new(),
            nodes: Vec::new(),
            distinct: 0,
        }
    }

    /// Tokens in a block.
    pub(crate) const fn block_size(&self) -> BlockSize {
        self.block_size
    }

    /// All requests.
    pub(crate) fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// The whole blocks of a request's prompt, in their order.
    pub(crate) fn path(&self, request: &Request) -> &[Node] {
        let end = request.start + request.whole_blocks;
        &self.nodes[request.start..end]
    }

    /// Different prefixes of whole blocks.
    pub(crate) const fn distinct_blocks(&self) -> u32 {
        self.distinct
    }

    /// Tokens of all prompts.
    pub(crate) fn prompt_tokens(&self) -> u64 {
        let tokens = self.requests.iter().map(|one| u64::from(one.prompt_tokens));
        tokens.sum()
    }

    /// Blocks of the longest prompt, and the place of its request; `None`: there are no requests.
    pub(crate) fn longest(&self) -> Option<(usize, usize)> {
        let blocks = self.requests.iter().map(|one| one.blocks(self.block_size));
        blocks
            .zip(0..)
            .max_by_key(|(blocks, place)| (*blocks, usize::MAX - place))
    }

    /// Makes all requests come `factor` times as fast; `factor` is above 0.
    pub(crate) fn speed_up(&mut self, factor: f64) {
        for request in &mut self.requests {
            request.at = Duration::try_from_secs_f64(request.at.as_secs_f64() / factor)
                .unwrap_or(Duration::MAX);
        }
    }

    /// Adds a request, which must not come before the last one; `nodes` are the whole blocks of its prompt.
    pub(crate) fn push(
        &mut self,
        at: Duration,
        prompt_tokens: u32,
        output_tokens: u32,
        nodes: impl IntoIterator<Item = Node>,
    ) {
        let start = self.nodes.len();
        self.nodes.extend(nodes);
        let added = &self.nodes[start..];
        let most = added
            .iter()
            .max()
            .map_or(0, |most| most.0.saturating_add(1));
        self.distinct = self.distinct.max(most);
        self.requests.push(Request {
            at,
            prompt_tokens,
            output_tokens,
            start,
            whole_blocks: added.len(),
        });
    }
}

impl Request {
    /// All blocks of the prompt, the last one begun among them.
    pub(crate) fn blocks(&self, size: BlockSize) -> usize {
        (self.prompt_tokens as usize).div_ceil(size.tokens())
    }
}

/// Numbers for the blocks of traces that name them otherwise.
///
/// A block is told apart by its name and the blocks before it, so that also names of blocks alone will do.
#[derive(Debug, Default)]
pub(crate) struct Interner {
    nodes: FxHashMap<(Option<Node>, u64), Node>,
}

impl Interner {
    /// The numbers of the blocks of a prompt, put into `nodes`.
    ///
    /// # Errors
    /// [`TooLarge`], if there are no more numbers.
    pub(crate) fn path(&mut self, names: &[u64], nodes: &mut Vec<Node>) -> Result<(), TooLarge> {
        nodes.clear();
        let mut parent = None;
        for name in names {
            let next = u32::try_from(self.nodes.len()).ok();
            let next = next.filter(|next| *next < u32::MAX);
            let next = next.ok_or(TooLarge::Blocks)?;
            let node = *self.nodes.entry((parent, *name)).or_insert(Node(next));
            nodes.push(node);
            parent = Some(node);
        }
        Ok(())
    }
}
