//! Tokens to block and sequence hashes, bit for bit those of `dynamo-kv-router` 1.6.1
//! (`src/protocols.rs`, `compute_block_hash_for_seq`; `dynamo-kv-hashing`, `compute_salt_hash`).

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
        }
    }

    /// Blocks that are hashed so far.
    pub fn hashed_blocks(&self) -> usize {
        self.hashes.len()
    }

    /// Whole blocks in it.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// The hashes of its first `blocks` blocks, or of all if it has fewer.
    pub fn hashed_to(&mut self, blocks: usize) -> &[BlockHash] {
        let end = blocks.min(self.blocks);
        let size = self.size.tokens();
        for block in self.hashes.len()..end {
            let start = block * size;
            let window = &self.tokens[start..start + size + usize::from(self.of.eagle)];
            let mut bytes: Vec<u8> = window
                .iter()
                .flat_map(|token| token.to_le_bytes())
                .collect();
            if let Some(media) = self.of.media.get(block) {
                let mut media = media.clone();
                media.sort_unstable();
                bytes.extend(media.iter().flat_map(|media| media.0.to_le_bytes()));
            }
            let hash = xxh3_64_with_seed(&bytes, self.of.namespace.0);
            self.hashes.push(BlockHash(hash));
        }
        &self.hashes[..end]
    }
}
