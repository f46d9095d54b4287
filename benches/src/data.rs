// SPDX-License-Identifier: Apache-2.0

//! What the workers cache: event streams made anew from seeds, so that none has to be kept in memory.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use kvdelta_indexer::{
    BlockHash, BlockSize, PromptOf, SequenceHash, block_hashes, next_sequence_hash,
};

use crate::trace::Trace;

/// Tokens in a block.
pub const BLOCK_TOKENS: u32 = 16;
/// Workers of every fleet.
pub const WORKERS: usize = 64;
/// Blocks of the longest event: a prefill in chunks of 2,048 tokens.
const CHUNK: usize = 128;
/// Tokens of the vocabulary.
const VOCABULARY: u32 = 151_936;

/// Blocks in one id of the trace, which stands for 512 tokens.
pub const BLOCKS_OF_ID: usize = 32;

/// One block of a chain.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// Hash of its tokens.
    pub block: BlockHash,
    /// The prefix that ends with it; the engine's hash too, which the positional peers rely on.
    pub sequence: SequenceHash,
}

/// One event.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// Whose cache, below `WORKERS`.
    pub worker: usize,
    /// What happened.
    pub change: Change<'a>,
}

/// What happened to a cache.
#[derive(Clone, Copy, Debug)]
pub enum Change<'a> {
    /// Blocks came in behind `parent`.
    Stored {
        /// The prefix before them.
        parent: Option<SequenceHash>,
        /// In order.
        blocks: &'a [Block],
    },
    /// Blocks were evicted.
    Removed(&'a [Block]),
}

/// Where events go.
pub type Sink<'a> = dyn FnMut(Step<'_>) + 'a;

/// Events kept to be given out several times.
#[derive(Debug, Default)]
pub struct Recording {
    blocks: Vec<Block>,
    steps: Vec<Recorded>,
}

#[derive(Debug)]
struct Recorded {
    worker: usize,
    /// `None`: they were removed.
    stored_behind: Option<Option<SequenceHash>>,
    blocks: Range<usize>,
}

impl Recording {
    /// The events of each of `data`, one after the other.
    pub fn of(data: &[Data]) -> Self {
        let mut recording = Self::default();
        for data in data {
            data.steps(&mut |step| {
                let (stored_behind, blocks) = match step.change {
                    Change::Stored { parent, blocks } => (Some(parent), blocks),
                    Change::Removed(blocks) => (None, blocks),
                };
                let start = recording.blocks.len();
                recording.blocks.extend_from_slice(blocks);
                recording.steps.push(Recorded {
                    worker: step.worker,
                    stored_behind,
                    blocks: start..recording.blocks.len(),
                });
            });
        }
        recording
    }

    /// All events, in order.
    pub fn steps(&self, mut sink: impl FnMut(Step<'_>)) {
        for recorded in &self.steps {
            let blocks = &self.blocks[recorded.blocks.clone()];
            sink(Step {
                worker: recorded.worker,
                change: match recorded.stored_behind {
                    Some(parent) => Change::Stored { parent, blocks },
                    None => Change::Removed(blocks),
                },
            });
        }
    }

    /// How many events there are, and how many blocks in them.
    pub fn size(&self) -> (usize, usize) {
        (self.steps.len(), self.blocks.len())
    }
}

/// A kind of fleet and its size.
#[derive(Clone, Debug)]
pub enum Data {
    /// Prompts to be matched to no, half and full depth, before a background of `Tree`.
    Prompts {
        /// Of 16 tokens, in each prompt.
        blocks: usize,
        /// How many prompts.
        prompts: usize,
    },
    /// Every block on all 64 workers.
    Everywhere {
        /// (worker, block) pairs.
        entries: usize,
    },
    /// System prompts on all workers, documents on half of them, conversations on an eighth.
    Tree {
        /// (worker, block) pairs.
        entries: usize,
    },
    /// A trace dealt out to the workers in turn, each with a cache of its own, least recently used out first.
    Trace {
        /// The trace.
        trace: Trace,
        /// How often it runs, each time with other tokens.
        passes: usize,
        /// Ids of 32 blocks that a worker can hold.
        capacity: usize,
    },
    /// Sequences that no two workers share, each growing by one block an event.
    Decode {
        /// (worker, block) pairs.
        entries: usize,
        /// Sequences that grow at once on one worker.
        sequences: usize,
    },
}

impl Data {
    /// The name in tables.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Prompts { .. } => "prompts",
            Self::Everywhere { .. } => "everywhere",
            Self::Tree { .. } => "tree",
            Self::Trace { .. } => "trace",
            Self::Decode { .. } => "decode",
        }
    }

    /// All events, in order.
    pub fn steps(&self, sink: &mut Sink<'_>) {
        match self {
            Self::Prompts { blocks, prompts } => held_prompts(*blocks, *prompts, sink),
            Self::Everywhere { entries } => everywhere(*entries, sink),
            Self::Tree { entries } => tree(*entries, sink),
            Self::Trace {
                trace,
                passes,
                capacity,
            } => caches(trace, *passes, *capacity, sink),
            Self::Decode { entries, sequences } => decode(*entries, *sequences, sink),
        }
    }

    /// Tokens of about `count` prompts that occur in the data.
    pub fn prompts(&self, count: usize) -> Vec<Vec<u32>> {
        match self {
            Self::Prompts { blocks, prompts } => {
                let all = 0..*prompts;
                all.map(|prompt| prompt_tokens(prompt, *blocks)).collect()
            }
            Self::Everywhere { entries } => {
                let prompts = spread(entries / WORKERS / EVERYWHERE_BLOCKS, count);
                prompts.map(everywhere_tokens).collect()
            }
            Self::Tree { entries } => {
                let leaves = documents(*entries) * CONVERSATIONS;
                spread(leaves, count)
                    .map(|leaf| {
                        let document = leaf / CONVERSATIONS;
                        let mut prompt = system_tokens(document / DOCUMENTS);
                        prompt.extend(document_tokens(document));
                        prompt.extend(conversation_tokens(leaf));
                        prompt
                    })
                    .collect()
            }
            Self::Trace { trace, passes, .. } => spread(trace.requests.len(), count)
                .map(|request| {
                    let ids = trace.requests[request].iter();
                    ids.flat_map(|id| id_tokens(passes - 1, *id)).collect()
                })
                .collect(),
            Self::Decode { entries, sequences } => {
                let length = entries / (WORKERS * sequences);
                spread(WORKERS * sequences, count)
                    .map(|sequence| {
                        (0..length)
                            .flat_map(|at| decode_tokens(sequence, at))
                            .collect()
                    })
                    .collect()
            }
        }
    }
}

/// `count` numbers below `of`, evenly spread.
fn spread(of: usize, count: usize) -> impl Iterator<Item = usize> {
    let count = count.min(of);
    (0..count).map(move |number| number * of / count)
}

const PROMPT: u64 = 1;
const FRESH: u64 = 2;
const EVERYWHERE: u64 = 3;
const SYSTEM: u64 = 4;
const DOCUMENT: u64 = 5;
const CONVERSATION: u64 = 6;
const ID: u64 = 7;
const DECODE: u64 = 8;

/// Documents under one system prompt, conversations under one document.
const DOCUMENTS: usize = 16;
const CONVERSATIONS: usize = 4;
/// Blocks of each part of the tree.
const SYSTEM_BLOCKS: usize = 128;
const DOCUMENT_BLOCKS: usize = 256;
const CONVERSATION_BLOCKS: usize = 256;
/// Pairs that one document with its conversations adds.
const DOCUMENT_ENTRIES: usize =
    DOCUMENT_BLOCKS * WORKERS / 2 + CONVERSATIONS * CONVERSATION_BLOCKS * WORKERS / 8;
const EVERYWHERE_BLOCKS: usize = 512;

/// Tokens of `blocks` blocks, the same for the same seed.
fn tokens(seed: &[u64], blocks: usize) -> Vec<u32> {
    let mixed = seed.iter().fold(0, |mixed: u64, part| {
        (mixed ^ part)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(29)
    });
    let mut random = fastrand::Rng::with_seed(mixed);
    let count = blocks * size().tokens();
    (0..count).map(|_| random.u32(..VOCABULARY)).collect()
}

/// The block size.
pub fn size() -> BlockSize {
    BlockSize::try_from(BLOCK_TOKENS).expect("is not 0")
}

fn number(value: usize) -> u64 {
    u64::try_from(value).expect("fits")
}

/// Appends the blocks of `tokens` to a chain.
pub fn extend(chain: &mut Vec<Block>, tokens: &[u32]) {
    for block in block_hashes(tokens, size(), PromptOf::default()) {
        let parent = chain.last().map(|last| last.sequence);
        let sequence = next_sequence_hash(parent, block);
        chain.push(Block { block, sequence });
    }
}

/// Stores the blocks `range` of `chain` in chunks.
fn store(worker: usize, chain: &[Block], range: Range<usize>, sink: &mut Sink<'_>) {
    let mut start = range.start;
    while start < range.end {
        let end = (start + CHUNK).min(range.end);
        sink(Step {
            worker,
            change: Change::Stored {
                parent: start.checked_sub(1).map(|last| chain[last].sequence),
                blocks: &chain[start..end],
            },
        });
        start = end;
    }
}

fn prompt_tokens(prompt: usize, blocks: usize) -> Vec<u32> {
    tokens(&[PROMPT, number(prompt), number(blocks)], blocks)
}

/// `prompt` with its blocks from `depth` on replaced by some that no worker holds.
pub fn diverging(prompt: &[u32], depth: usize) -> Vec<u32> {
    let (kept, rest) = prompt.split_at(depth * size().tokens());
    let seed = u64::from(prompt.first().copied().unwrap_or(0));
    let fresh = tokens(&[FRESH, seed, number(depth)], rest.len() / size().tokens());
    [kept, &fresh].concat()
}

/// All of a prompt on 8 workers, half of it on 24 more, an eighth on all others.
fn held_prompts(blocks: usize, prompts: usize, sink: &mut Sink<'_>) {
    for prompt in 0..prompts {
        let mut chain = Vec::with_capacity(blocks);
        extend(&mut chain, &prompt_tokens(prompt, blocks));
        for worker in 0..WORKERS {
            let depth = match (worker + 7 * prompt) % WORKERS {
                0..8 => blocks,
                8..32 => blocks / 2,
                _ => blocks / 8,
            };
            store(worker, &chain, 0..depth, sink);
        }
    }
}

fn everywhere_tokens(prompt: usize) -> Vec<u32> {
    // Eight prompts begin alike.
    let shared = EVERYWHERE_BLOCKS / 8;
    let mut all = tokens(&[EVERYWHERE, number(prompt / 8)], shared);
    all.extend(tokens(
        &[EVERYWHERE, number(prompt), 1],
        EVERYWHERE_BLOCKS - shared,
    ));
    all
}

fn everywhere(entries: usize, sink: &mut Sink<'_>) {
    let shared = EVERYWHERE_BLOCKS / 8;
    let mut prompt = 0;
    let mut left = entries / WORKERS;
    while left > 0 {
        let mut chain = Vec::with_capacity(EVERYWHERE_BLOCKS);
        extend(&mut chain, &everywhere_tokens(prompt));
        let start = if prompt % 8 == 0 { 0 } else { shared };
        let end = EVERYWHERE_BLOCKS.min(start + left);
        for worker in 0..WORKERS {
            store(worker, &chain, start..end, sink);
        }
        left -= end - start;
        prompt += 1;
    }
}

fn system_tokens(system: usize) -> Vec<u32> {
    tokens(&[SYSTEM, number(system)], SYSTEM_BLOCKS)
}

fn document_tokens(document: usize) -> Vec<u32> {
    tokens(&[DOCUMENT, number(document)], DOCUMENT_BLOCKS)
}

fn conversation_tokens(conversation: usize) -> Vec<u32> {
    tokens(&[CONVERSATION, number(conversation)], CONVERSATION_BLOCKS)
}

/// Documents that make up about `entries` pairs.
fn documents(entries: usize) -> usize {
    let of_system = DOCUMENT_ENTRIES + SYSTEM_BLOCKS * WORKERS / DOCUMENTS;
    (entries / of_system).max(1)
}

fn tree(entries: usize, sink: &mut Sink<'_>) {
    for document in 0..documents(entries) {
        let mut chain = Vec::with_capacity(SYSTEM_BLOCKS + DOCUMENT_BLOCKS + CONVERSATION_BLOCKS);
        extend(&mut chain, &system_tokens(document / DOCUMENTS));
        if document % DOCUMENTS == 0 {
            for worker in 0..WORKERS {
                store(worker, &chain, 0..SYSTEM_BLOCKS, sink);
            }
        }
        extend(&mut chain, &document_tokens(document));
        let holder = |place: usize| (place + document * 5) % WORKERS;
        for place in 0..WORKERS / 2 {
            store(holder(place), &chain, SYSTEM_BLOCKS..chain.len(), sink);
        }
        for conversation in 0..CONVERSATIONS {
            let start = SYSTEM_BLOCKS + DOCUMENT_BLOCKS;
            chain.truncate(start);
            let leaf = document * CONVERSATIONS + conversation;
            extend(&mut chain, &conversation_tokens(leaf));
            for place in 0..WORKERS / 8 {
                let worker = holder(conversation * WORKERS / 8 + place);
                store(worker, &chain, start..chain.len(), sink);
            }
        }
    }
}

fn decode_tokens(sequence: usize, at: usize) -> Vec<u32> {
    tokens(&[DECODE, number(sequence), number(at)], 1)
}

fn decode(entries: usize, sequences: usize, sink: &mut Sink<'_>) {
    let all = WORKERS * sequences;
    let mut last: Vec<Option<SequenceHash>> = vec![None; all];
    for at in 0..entries / all {
        for (sequence, last) in last.iter_mut().enumerate() {
            let block = block_hashes(&decode_tokens(sequence, at), size(), PromptOf::default())[0];
            let block = Block {
                block,
                sequence: next_sequence_hash(*last, block),
            };
            sink(Step {
                worker: sequence % WORKERS,
                change: Change::Stored {
                    parent: *last,
                    blocks: &[block],
                },
            });
            *last = Some(block.sequence);
        }
    }
}

fn id_tokens(pass: usize, id: u32) -> Vec<u32> {
    tokens(&[ID, number(pass), u64::from(id)], BLOCKS_OF_ID)
}

/// One worker's cache of ids.
#[derive(Default)]
struct Cache {
    /// When each id was last used, and the other way round. A prefix is always younger than what
    /// follows it, so the oldest id is a tail.
    used: HashMap<(usize, u32), u64>,
    oldest: BTreeMap<u64, (usize, u32)>,
}

impl Cache {
    fn touch(&mut self, id: (usize, u32), now: u64) {
        if let Some(before) = self.used.insert(id, now) {
            self.oldest.remove(&before);
        }
        self.oldest.insert(now, id);
    }
}

fn caches(trace: &Trace, passes: usize, capacity: usize, sink: &mut Sink<'_>) {
    let mut caches: Vec<Cache> = (0..WORKERS).map(|_| Cache::default()).collect();
    let mut blocks_of: HashMap<(usize, u32), Vec<Block>> = HashMap::new();
    let mut now = 0;
    let requests = (0..passes).flat_map(|pass| trace.requests.iter().map(move |ids| (pass, ids)));
    for (number, (pass, ids)) in requests.enumerate() {
        let worker = number % WORKERS;
        let cache = &mut caches[worker];
        let ids = ids.iter().take(capacity).map(|id| (pass, *id));
        let ids: Vec<(usize, u32)> = ids.collect();
        let mut chain: Vec<Block> = Vec::with_capacity((ids.len() + 1) * BLOCKS_OF_ID);
        for id in &ids {
            if let Some(blocks) = blocks_of.get(id) {
                chain.extend_from_slice(blocks);
            } else {
                let start = chain.len();
                extend(&mut chain, &id_tokens(pass, id.1));
                blocks_of.insert(*id, chain[start..].to_vec());
            }
        }
        let held = ids.iter().take_while(|id| cache.used.contains_key(id));
        let held = held.count();
        for id in ids.iter().rev() {
            cache.touch(*id, now);
            now += 1;
        }
        while cache.used.len() > capacity {
            let Some((_, id)) = cache.oldest.pop_first() else {
                break;
            };
            cache.used.remove(&id);
            sink(Step {
                worker,
                change: Change::Removed(&blocks_of[&id]),
            });
        }
        store(worker, &chain, held * BLOCKS_OF_ID..chain.len(), sink);
    }
}
