//! An index that is fed with payloads, as a feed would.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use kvdelta_indexer::{
    BadBatch, BlockSize, CacheGroups, Dialect, EngineHash, Index, MediaHash, Normalized,
    Normalizer, Prompt, PromptOf, Refused, Skipped, Tier, WireBatch, WorkerRank, namespace,
};
use serde_json::Value;

/// An index of blocks of 4 tokens and ranks that publish.
#[derive(Debug)]
pub(crate) struct Fleet {
    pub(crate) index: Index,
    ranks: BTreeMap<WorkerRank, Normalizer>,
    dialect: Dialect,
    /// Why the index refused events, in their order.
    pub(crate) refused: Vec<Refused>,
}

/// Rank 0 of worker 1.
pub(crate) const W1: WorkerRank = WorkerRank::new(1, 0);

impl Fleet {
    pub(crate) fn new(dialect: Dialect) -> Self {
        let mut fleet = Self {
            index: Index::new(four()),
            ranks: BTreeMap::new(),
            dialect,
            refused: Vec::new(),
        };
        fleet.admit(W1);
        fleet
    }

    pub(crate) fn admit(&mut self, of: WorkerRank) {
        self.index.admit(of);
    }

    /// Applies a payload that came by the socket of `W1`: what was skipped.
    pub(crate) fn publish(&mut self, payload: &[u8]) -> Vec<Skipped> {
        self.try_publish(payload).expect("a batch")
    }

    pub(crate) fn try_publish(&mut self, payload: &[u8]) -> Result<Vec<Skipped>, BadBatch> {
        let batch = WireBatch::decode(payload)?;
        let of = WorkerRank {
            rank: batch.rank.unwrap_or(W1.rank),
            ..W1
        };
        let new = Normalizer::new(of, four(), self.dialect);
        let normalizer = self.ranks.entry(of).or_insert(new);
        let mut skipped = Vec::new();
        for event in batch.events() {
            let done = match event {
                Err(why) => Normalized::from(why),
                Ok(event) => {
                    normalizer.normalize(event, |engine| self.index.namespace_of(of, engine))
                }
            };
            skipped.extend(done.skipped);
            let applied = done.event.map(|event| self.index.apply(&event));
            self.refused
                .extend(applied.and_then(|applied| applied.refused));
        }
        Ok(skipped)
    }

    /// Labels of what was skipped in a batch of these events.
    pub(crate) fn events(&mut self, events: Value) -> Vec<&'static str> {
        let skipped = self.publish(&batch(events));
        skipped.iter().map(Skipped::as_label).collect()
    }

    pub(crate) fn groups(&self) -> CacheGroups {
        self.ranks
            .get(&W1)
            .map(Normalizer::groups)
            .unwrap_or_default()
    }

    /// Blocks in the device memory of `W1`, of a prompt without adapter, salt and media.
    pub(crate) fn q(&self, tokens: &[u32]) -> usize {
        self.overlap(W1, Tier::Device, tokens, PromptOf::default())
            .0
    }

    /// The same with a salt and an adapter.
    pub(crate) fn q_in(&self, tokens: &[u32], lora: Option<&str>, salt: Option<&str>) -> usize {
        let of = PromptOf {
            namespace: namespace(lora, salt),
            ..PromptOf::default()
        };
        self.overlap(W1, Tier::Device, tokens, of).0
    }

    /// The same with media in its blocks.
    pub(crate) fn q_with(&self, tokens: &[u32], media: &[Vec<MediaHash>]) -> usize {
        let of = PromptOf {
            media,
            ..PromptOf::default()
        };
        self.overlap(W1, Tier::Device, tokens, of).0
    }

    pub(crate) fn overlap(
        &self,
        of: WorkerRank,
        tier: Tier,
        tokens: &[u32],
        prompt: PromptOf<'_>,
    ) -> (usize, Option<EngineHash>) {
        let mut prompt = Prompt::new(tokens, four(), prompt);
        let found = self.index.overlap_of(of, tier, &mut prompt);
        found.map_or((0, None), |found| (found.blocks, Some(found.engine)))
    }
}

pub(crate) fn four() -> BlockSize {
    BlockSize::try_from(4).expect("a block size")
}

/// The payload of these events at time 0, of the socket's rank.
pub(crate) fn batch(events: Value) -> Vec<u8> {
    rmp_serde::to_vec_named(&(0.0, events, Option::<u32>::None)).expect("MessagePack")
}

/// The bytes of a hexadecimal string.
pub(crate) fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex
        .chars()
        .map(|digit| u8::try_from(digit.to_digit(16).expect("a digit")).expect("4 bits"))
        .collect();
    digits
        .chunks(2)
        .map(|pair| pair[0] << 4 | pair[1])
        .collect()
}

/// A payload of vLLM 0.31, made by `tests/engines/kv_event_fixtures.py`.
pub(crate) fn of_vllm(name: &str) -> Vec<u8> {
    find(all_of_vllm(), name)
}

/// A payload of SGLang 0.5.21, made by `tests/engines/sglang_event_fixtures.py`.
pub(crate) fn of_sglang(name: &str) -> Vec<u8> {
    find(all_of_sglang(), name)
}

fn find(all: Vec<(String, Vec<u8>)>, name: &str) -> Vec<u8> {
    let found = all.into_iter().find(|(found, _)| found == name);
    found.unwrap_or_else(|| panic!("no payload {name}")).1
}

/// All of vLLM's with their names.
pub(crate) fn all_of_vllm() -> Vec<(String, Vec<u8>)> {
    static ALL: LazyLock<Vec<(String, Vec<u8>)>> = LazyLock::new(|| {
        read(include_str!(
            "../../../../tests/fixtures/wire/vllm-0.31.json"
        ))
    });
    ALL.clone()
}

/// All of SGLang's with their names.
pub(crate) fn all_of_sglang() -> Vec<(String, Vec<u8>)> {
    static ALL: LazyLock<Vec<(String, Vec<u8>)>> = LazyLock::new(|| {
        read(include_str!(
            "../../../../tests/fixtures/wire/sglang-0.5.21.json"
        ))
    });
    ALL.clone()
}

fn read(fixtures: &str) -> Vec<(String, Vec<u8>)> {
    let all: BTreeMap<String, String> = serde_json::from_str(fixtures).expect("JSON");
    let all = all.into_iter();
    all.map(|(name, hex)| (name, bytes(&hex))).collect()
}
