//! Tokens to block and sequence hashes, bit for bit those of `dynamo-kv-router` 1.6.1
//! (`src/protocols.rs`, `compute_block_hash_for_seq`; `dynamo-kv-hashing`, `compute_salt_hash`).

use std::sync::atomic::{AtomicU64, Ordering};

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::ids::{BlockHash, BlockSize, Namespace, SequenceHash};

/// Seed of an unsalted base model's block hashes, and of every chain.
const SEED: u64 = 1337;

/// Dynamo's routing hash of an image, a video or other media (`mm_hash`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MediaHash(pub u64);

/// The namespace of a LoRA adapter and a cache salt. An empty name is no name.
pub fn namespace(lora: Option<&str>, salt: Option<&str>) -> Namespace {
    let part = |name: Option<&str>, kind| {
        let name = name.filter(|name| !name.is_empty());
        name.map_or(0, |name| xxh3_64_with_seed(name.as_bytes(), kind))
    };
    Namespace(SEED.wrapping_add(part(lora, 0)).wrapping_add(part(salt, 1)))
}

/// The sequence hash of a prefix from that of the prefix one block shorter (`None`: there is none).
pub fn next_sequence_hash(parent: Option<SequenceHash>, block: BlockHash) -> SequenceHash {
    match parent {
        None => SequenceHash(block.0),
        Some(parent) => {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&parent.0.to_le_bytes());
            bytes[8..].copy_from_slice(&block.0.to_le_bytes());
            SequenceHash(xxh3_64_with_seed(&bytes, SEED))
        }
    }
}

/// What besides its tokens decides a prompt's hashes.
#[derive(Clone, Copy, Debug)]
pub struct PromptOf<'a> {
    /// Seed of the block hashes.
    pub namespace: Namespace,
    /// Whether a block is hashed with the token after it, as engines with EAGLE do.
    pub eagle: bool,
    /// The media in each block, by block; blocks past its end have none.
    pub media: &'a [Vec<MediaHash>],
}

impl Default for PromptOf<'_> {
    fn default() -> Self {
        Self {
            namespace: namespace(None, None),
            eagle: false,
            media: &[],
        }
    }
}

/// Hashes of all whole blocks of `tokens`.
pub fn block_hashes(tokens: &[u32], size: BlockSize, of: PromptOf<'_>) -> Vec<BlockHash> {
    let mut prompt = Prompt::new(tokens, size, of);
    let all = prompt.blocks();
    prompt.hashed_to(all).to_vec()
}

/// A prompt whose hashes are computed once, and only as far as they are asked for.
#[derive(Clone, Debug)]
pub struct Prompt<'a> {
    tokens: &'a [u32],
    size: BlockSize,
    of: PromptOf<'a>,
    blocks: usize,
    hashes: Vec<BlockHash>,
    /// The last sequence hash that was asked for, and of how many blocks.
    sequence: (usize, Option<SequenceHash>),
}

impl<'a> Prompt<'a> {
    /// A prompt that is not hashed yet.
    pub fn new(tokens: &'a [u32], size: BlockSize, of: PromptOf<'a>) -> Self {
        let whole = tokens.len().saturating_sub(usize::from(of.eagle)) / size.tokens();
        Self {
            tokens,
            size,
            of,
            blocks: whole,
            hashes: Vec::new(),
            sequence: (0, None),
        }
    }

    /// A prompt whose hashes somebody else computed, whole.
    pub fn hashed(hashes: Vec<BlockHash>, size: BlockSize) -> Self {
        Self {
            tokens: &[],
            size,
            of: PromptOf::default(),
            blocks: hashes.len(),
            hashes,
            sequence: (0, None),
        }
    }

    /// Blocks that are hashed so far.
    pub fn hashed_blocks(&self) -> usize {
        self.hashes.len()
    }

    /// Asks it as if it had no more than its first `blocks` blocks. What is hashed meanwhile stays.
    pub fn within<R>(&mut self, blocks: usize, ask: impl FnOnce(&mut Self) -> R) -> R {
        let all = self.blocks;
        self.blocks = blocks.min(all);
        let answer = ask(self);
        self.blocks = all;
        answer
    }

    /// Whole blocks in it.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// The hashes of its first `blocks` blocks, or of all if it has fewer.
    #[inline]
    pub fn hashed_to(&mut self, blocks: usize) -> &[BlockHash] {
        let end = blocks.min(self.blocks);
        if end > self.hashes.len() {
            self.hash_to(end);
        }
        self.hashes.get(..end).unwrap_or_default()
    }

    /// The sequence hash of its first `blocks` blocks; `None`: 0, or more than it has.
    ///
    /// Chaining costs more than hashing a block and no query needs it, so it is done only here.
    pub fn sequence_hash(&mut self, blocks: usize) -> Option<SequenceHash> {
        if blocks > self.blocks {
            return None;
        }
        let (known, parent) = if self.sequence.0 <= blocks {
            self.sequence
        } else {
            (0, None)
        };
        let rest = self.hashed_to(blocks).get(known..).unwrap_or_default();
        let chain = rest.iter().fold(parent, |parent, block| {
            Some(next_sequence_hash(parent, *block))
        });
        self.sequence = (blocks, chain);
        chain
    }

    /// How many blocks from `position` on have the hashes `cells`. Hashes no further than these reach, or, for
    /// fewer and longer runs, an eighth further than the prompt is known to match.
    #[inline(always)]
    pub(crate) fn common(&mut self, position: usize, cells: &[AtomicU64]) -> usize {
        let ahead = cells.len().max((position / 8).min(AHEAD_BLOCKS));
        let hashes = self.hashed_to(position + ahead);
        common(cells, hashes.get(position..).unwrap_or_default())
    }

    #[inline(never)]
    fn hash_to(&mut self, end: usize) {
        let (size, from) = (self.size.tokens(), self.hashes.len());
        let seed = self.of.namespace.0;
        // With most prompts the first block stays the only one: what is asked for at first costs no more than
        // room for one.
        let room = if from > 0 {
            self.blocks
        } else {
            self.blocks.min(FIRST_ROOM)
        };
        self.hashes.reserve_exact(room.max(end) - from);
        let plain = cfg!(target_endian = "little") && !self.of.eagle && self.of.media.is_empty();
        if plain && let Some(tokens) = self.tokens.get(from * size..end * size) {
            // Into cells that are there already and by a length that the compiler does not know: a quarter
            // faster than the shorter ways to write it (`bench index`, hashing).
            self.hashes.resize(end, BlockHash(0));
            let hashes = self.hashes.get_mut(from..).unwrap_or_default();
            for (hash, block) in hashes.iter_mut().zip(tokens.chunks_exact(size)) {
                // The hash is of little-endian bytes, which is how the tokens lie in memory.
                *hash = BlockHash(xxh3_64_with_seed(bytemuck::cast_slice(block), seed));
            }
            return;
        }
        let mut bytes = Vec::new();
        for block in from..end {
            let start = block * size;
            let window = self
                .tokens
                .get(start..start + size + usize::from(self.of.eagle));
            bytes.clear();
            bytes.extend(
                window
                    .unwrap_or_default()
                    .iter()
                    .flat_map(|token| token.to_le_bytes()),
            );
            if let Some(media) = self.of.media.get(block) {
                let mut media = media.clone();
                media.sort_unstable();
                bytes.extend(media.iter().flat_map(|media| media.0.to_le_bytes()));
            }
            self.hashes.push(BlockHash(xxh3_64_with_seed(&bytes, seed)));
        }
    }
}

/// Hashes that there is room for at first: 1 KiB, which the system's allocator keeps at hand.
const FIRST_ROOM: usize = 128;

/// How far a prompt is hashed ahead of its match at most.
const AHEAD_BLOCKS: usize = 256;

/// Hashes that are compared at once.
const LANES: usize = 4;

/// Leading hashes that are the same.
#[inline(never)]
fn common(cells: &[AtomicU64], hashes: &[BlockHash]) -> usize {
    let differs = |(cell, hash): (&AtomicU64, &BlockHash)| cell.load(Ordering::Relaxed) ^ hash.0;
    let mut same = 0;
    let lanes = cells.as_chunks::<LANES>().0.iter();
    for (cells, hashes) in lanes.zip(hashes.as_chunks::<LANES>().0) {
        // Without a branch for each hash.
        let pairs = cells.iter().zip(hashes);
        if pairs.map(differs).fold(0, |any, one| any | one) != 0 {
            break;
        }
        same += LANES;
    }
    let rest = cells.iter().zip(hashes).skip(same);
    same + rest.take_while(|pair| differs(*pair) == 0).count()
}

#[cfg(test)]
mod tests {
    use dynamo_kv_router::protocols::{
        BlockExtraInfo, BlockHashOptions, BlockMmObjectInfo, compute_block_hash_for_seq,
        compute_seq_hash_for_block,
    };
    use proptest::prelude::*;

    use super::*;

    fn media() -> impl Strategy<Value = Vec<Vec<MediaHash>>> {
        let hashes = prop::collection::vec(any::<u64>().prop_map(MediaHash), 0..3);
        prop::collection::vec(hashes, 0..6)
    }

    proptest! {
        #[test]
        fn hashes_are_those_of_dynamo(
            tokens in prop::collection::vec(any::<u32>(), 0..200),
            size in 1_u32..70,
            lora in prop::option::of("[ab]{0,2}"),
            salt in prop::option::of("[ab]{0,2}"),
            eagle in any::<bool>(),
            media in media(),
            steps in prop::collection::vec(0_usize..50, 0..5),
        ) {
            let infos: Vec<_> = media.iter().map(|block| {
                let objects = block.iter().map(|media| BlockMmObjectInfo {
                    mm_hash: media.0,
                    offsets: Vec::new(),
                });
                (!block.is_empty()).then(|| BlockExtraInfo { mm_objects: objects.collect() })
            }).collect();
            let theirs = compute_block_hash_for_seq(&tokens, size, BlockHashOptions {
                block_mm_infos: Some(&infos),
                lora_name: lora.as_deref(),
                cache_namespace: salt.as_deref(),
                is_eagle: Some(eagle),
            });
            let of = PromptOf {
                namespace: namespace(lora.as_deref(), salt.as_deref()),
                eagle,
                media: &media,
            };
            let mut prompt = Prompt::new(&tokens, BlockSize::try_from(size).unwrap(), of);
            for step in steps {
                let hashed = prompt.hashed_to(step).len();
                prop_assert_eq!(hashed, step.min(theirs.len()));
            }
            let all = prompt.blocks();
            let ours: Vec<_> = prompt.hashed_to(all).iter().map(|hash| hash.0).collect();
            prop_assert_eq!(ours, theirs.iter().map(|hash| hash.0).collect::<Vec<_>>());
            let mut sequence = None;
            for (block, theirs) in theirs.iter().zip(compute_seq_hash_for_block(&theirs)) {
                sequence = Some(next_sequence_hash(sequence, BlockHash(block.0)));
                prop_assert_eq!(sequence, Some(SequenceHash(theirs)));
            }
            let chained = compute_seq_hash_for_block(&theirs);
            for blocks in [all, all / 2, all / 2 + 1, 0, all + 1] {
                let right = blocks.checked_sub(1).and_then(|last| chained.get(last));
                prop_assert_eq!(prompt.sequence_hash(blocks), right.copied().map(SequenceHash));
            }
        }
    }

    #[test]
    fn a_salt_is_no_adapter_and_an_empty_one_is_none() {
        let all = [
            namespace(None, None),
            namespace(Some("A"), None),
            namespace(None, Some("A")),
            namespace(Some("A"), Some("A")),
        ];
        for (at, one) in all.iter().enumerate() {
            assert!(!all[at + 1..].contains(one));
        }
        assert_eq!(namespace(Some(""), Some("")), all[0]);
    }
}
