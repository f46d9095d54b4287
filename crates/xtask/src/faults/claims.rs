// SPDX-License-Identifier: Apache-2.0

//! What the engines hold by their own KV events, and the claims that follow, true and false ones.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use kvdelta_indexer::feed::zmq::{EngineFeed, Timing};
use kvdelta_indexer::feed::{Admission, Control, Follower, Settings};
use kvdelta_indexer::{
    BlockSize, Dialect, EngineHash, Index, Prompt, PromptOf, Tier, WorkerRank, namespace,
};
use kvdelta_overlap::{Cached, Claimable, PromptShape, claimable};
use kvdelta_protocol::{DecodeCacheInfo, VERSION};
use tokio::task::JoinHandle;

use crate::faults::engine::Engine;
use crate::fleet::BLOCK_SIZE;

/// An engine's events are on their way a little longer than its answer; a busy machine needs seconds.
const EVENTS_ARRIVE: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(20);

/// A prompt as its hashes see it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hashed<'a> {
    pub(crate) tokens: &'a [u32],
    pub(crate) salt: Option<&'a str>,
}

impl<'a> Hashed<'a> {
    fn prompt(self, size: BlockSize) -> Prompt<'a> {
        let of = PromptOf {
            namespace: namespace(None, self.salt),
            ..PromptOf::default()
        };
        Prompt::new(self.tokens, size, of)
    }
}

/// An index that follows all engines.
#[derive(Debug)]
pub(crate) struct Claims {
    size: BlockSize,
    index: Arc<Index>,
    control: Control,
    task: JoinHandle<()>,
}

impl Claims {
    /// Follows `engines` over all their lives.
    pub(crate) fn follow<'a>(engines: impl IntoIterator<Item = &'a Engine>) -> Result<Self> {
        let size = BlockSize::try_from(u32::try_from(BLOCK_SIZE)?)?;
        let index = Arc::new(Index::new(size));
        let (follower, control) = Follower::new(Arc::clone(&index), Settings::default());
        for engine in engines {
            let [publisher, replay] = engine.events();
            let feed = EngineFeed::new(
                engine.of,
                Dialect::Vllm,
                0,
                &publisher,
                Some(&replay),
                "",
                Timing::default(),
            )?;
            control.follow(Arc::new(feed), Admission::Named);
        }
        Ok(Self {
            size,
            index,
            control,
            task: tokio::spawn(follower.run()),
        })
    }

    /// What `of` holds of the first `most` blocks of a prompt.
    fn held_within(&self, of: WorkerRank, prompt: Hashed<'_>, most: usize) -> Cached {
        let mut prompt = prompt.prompt(self.size);
        let overlap = prompt.within(most, |prompt| {
            self.index.overlap_of(of, Tier::Device, prompt)
        });
        Cached {
            of,
            blocks: overlap.map_or(0, |overlap| overlap.blocks),
            last: overlap.map(|overlap| overlap.engine),
        }
    }

    fn shape(&self, prompt: Hashed<'_>) -> PromptShape {
        PromptShape {
            prompt_tokens: prompt.tokens.len(),
            block_size: self.size,
            drops_last_block: false,
        }
    }

    /// Blocks of the prompt that `of` holds, of those that may be claimed.
    pub(crate) fn held(&self, of: WorkerRank, prompt: Hashed<'_>) -> usize {
        let most = self.shape(prompt).most_blocks();
        self.held_within(of, prompt, most).blocks
    }

    /// Waits until `of` holds `blocks` blocks by its events; whether it came to that.
    pub(crate) async fn holds(&self, of: WorkerRank, prompt: Hashed<'_>, blocks: usize) -> bool {
        let deadline = Instant::now() + EVENTS_ARRIVE;
        while self.held(of, prompt) < blocks {
            if Instant::now() > deadline {
                return false;
            }
            tokio::time::sleep(POLL).await;
        }
        true
    }

    /// The claim that a router would make.
    pub(crate) fn claim(
        &self,
        of: WorkerRank,
        prompt: Hashed<'_>,
        claim_id: &str,
    ) -> Option<DecodeCacheInfo> {
        let shape = self.shape(prompt);
        let cached = self.held_within(of, prompt, shape.most_blocks());
        let standing = self.control.trust().standing(of, self.control.now());
        let claimable = claimable(cached, standing, shape).ok()?;
        Some(self.info(claimable, claim_id))
    }

    /// A claim that `of` holds `blocks` blocks, with the hash that `known` has of the last one.
    pub(crate) fn forced(
        &self,
        of: WorkerRank,
        known: WorkerRank,
        prompt: Hashed<'_>,
        blocks: usize,
        claim_id: &str,
    ) -> Option<DecodeCacheInfo> {
        let found = self.held_within(known, prompt, blocks);
        let claimable = Claimable {
            of,
            blocks,
            prefix_hash: found
                .last
                .filter(|_| found.blocks == blocks && blocks > 0)?,
        };
        Some(self.info(claimable, claim_id))
    }

    fn info(&self, claimable: Claimable, claim_id: &str) -> DecodeCacheInfo {
        DecodeCacheInfo {
            version: VERSION,
            claim_id: claim_id.to_owned(),
            decode_worker_id: claimable.of.worker,
            decode_dp_rank: claimable.of.rank,
            cached_prefix_blocks: u32::try_from(claimable.blocks).unwrap_or(u32::MAX),
            block_size: self.size,
            prefix_hash: claimable.prefix_hash,
        }
    }

    /// The engine's hashes of blocks `range` of a prompt, as far as `of` holds them.
    pub(crate) fn engine_hashes(
        &self,
        of: WorkerRank,
        prompt: Hashed<'_>,
        range: std::ops::Range<usize>,
    ) -> Vec<EngineHash> {
        range
            .filter_map(|block| {
                let found = self.held_within(of, prompt, block + 1);
                found.last.filter(|_| found.blocks == block + 1)
            })
            .collect()
    }
}

impl Drop for Claims {
    fn drop(&mut self) {
        self.task.abort();
    }
}
