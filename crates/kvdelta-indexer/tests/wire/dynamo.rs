//! The same payloads read by Dynamo's decoder and normalizer and by ours: the same blocks with the same
//! hashes, but for the differences that are listed at the end, each with its reason.

use std::collections::BTreeMap;

use dynamo_kv_router::protocols::{
    KvCacheEventData, KvCacheStoreData, PlacementEvent, StorageTier, WorkerWithDpRank,
};
use dynamo_kv_router::zmq_wire::{ZmqEventNormalizer, decode_event_batch};
use kvdelta_indexer::{
    BlockHash, Change, Dialect, EngineHash, Namespace, Normalizer, Stored, StoredBlock, Tier,
    WireBatch,
};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::fleet::{W1, all_of_sglang, all_of_vllm, batch, four};

/// What either of them makes of one event.
#[derive(Clone, Debug, PartialEq)]
enum Made {
    Nothing,
    Stored(Tier, Option<EngineHash>, Vec<StoredBlock>),
    Placed(Tier, Vec<EngineHash>),
    Removed(Tier, Vec<EngineHash>),
    Cleared,
}

/// Dynamo: one for each event, or nothing for a batch that it drops.
fn by_dynamo(payloads: &[Vec<u8>]) -> Vec<Option<Vec<Made>>> {
    let worker = WorkerWithDpRank::new(W1.worker.0, W1.rank.0);
    let mut normalizer = ZmqEventNormalizer::new(4);
    let mut made = |payload: &Vec<u8>| {
        let batch = decode_event_batch(payload).ok()?;
        let events = batch.events.into_iter();
        Some(
            events
                .map(|raw| {
                    normalizer
                        .normalize(raw, 0, worker)
                        .map_or(Made::Nothing, of_dynamo)
                })
                .collect(),
        )
    };
    payloads.iter().map(&mut made).collect()
}

fn of_dynamo(event: PlacementEvent) -> Made {
    let tier = match event.placement.tier {
        StorageTier::Device => Tier::Device,
        StorageTier::HostPinned => Tier::Host,
        StorageTier::Disk | StorageTier::External => Tier::Disk,
    };
    match event.event.data {
        KvCacheEventData::Stored(KvCacheStoreData {
            parent_hash,
            start_position: _,
            blocks,
        }) => {
            let blocks = blocks.into_iter().map(|block| StoredBlock {
                block: BlockHash(block.tokens_hash.0),
                engine: EngineHash(block.block_hash.0),
            });
            let parent = parent_hash.map(|parent| EngineHash(parent.0));
            Made::Stored(tier, parent, blocks.collect())
        }
        KvCacheEventData::Removed(removed) => {
            let hashes = removed.block_hashes.into_iter();
            Made::Removed(tier, hashes.map(|hash| EngineHash(hash.0)).collect())
        }
        KvCacheEventData::Cleared => Made::Cleared,
    }
}

/// Ours, with a map in the index's place: what a block's children inherit.
fn by_us(payloads: &[Vec<u8>], dialect: Dialect) -> Vec<Option<Vec<Made>>> {
    let mut normalizer = Normalizer::new(W1, four(), dialect);
    let mut namespaces: BTreeMap<EngineHash, Namespace> = BTreeMap::new();
    let mut made = |payload: &Vec<u8>| {
        let batch = WireBatch::decode(payload).ok()?;
        let events = batch.events().map(|event| {
            let Ok(event) = event else {
                return Made::Nothing;
            };
            let done = normalizer.normalize(event, |engine| namespaces.get(&engine).copied());
            match done.event.map(|event| event.change) {
                None => Made::Nothing,
                Some(Change::Placed {
                    tier,
                    engine_hashes,
                }) => Made::Placed(tier, engine_hashes),
                Some(Change::Removed {
                    tier,
                    engine_hashes,
                }) => Made::Removed(tier, engine_hashes),
                Some(Change::Cleared) => Made::Cleared,
                Some(Change::Stored(Stored {
                    tier,
                    parent,
                    namespace,
                    blocks,
                    ..
                })) => {
                    for block in &blocks {
                        namespaces.extend(namespace.map(|namespace| (block.engine, namespace)));
                    }
                    Made::Stored(tier, parent, blocks)
                }
            }
        });
        Some(events.collect())
    };
    payloads.iter().map(&mut made).collect()
}

/// A chain of blocks that an engine stores in several steps.
#[derive(Clone, Debug)]
struct Chain {
    lora: Option<&'static str>,
    salt: Option<&'static str>,
    /// How the salt is told: as a field, or among the extra keys.
    salt_as_key: bool,
    steps: Vec<Step>,
}

#[derive(Clone, Debug)]
struct Step {
    blocks: usize,
    token: u32,
    eagle: bool,
    array: bool,
    medium: Option<&'static str>,
    /// The group's number and kind.
    group: (Option<u32>, Option<&'static str>),
    locality: Option<&'static str>,
    /// An image's routing hash, and in which blocks it lies.
    image: Option<(u64, u8)>,
    remove: bool,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let medium = prop::sample::select(vec![
        None,
        Some("GPU"),
        Some("CPU"),
        Some("CPU_PINNED"),
        Some("DISK"),
        Some("FS"),
        Some(""),
    ]);
    let group = prop::sample::select(vec![
        (None, None),
        (Some(0), None),
        (Some(0), Some("full_attention")),
        (None, Some("mla_attention")),
        (Some(1), Some("sliding_window")),
        (Some(2), Some("mamba")),
        (Some(2), None),
        (None, Some("of_tomorrow")),
    ]);
    let locality = prop::sample::select(vec![None, None, Some("LOCAL"), Some("REMOTE")]);
    let image = prop::option::of((any::<u64>(), any::<u8>()));
    let booleans = (any::<bool>(), any::<bool>(), any::<bool>());
    let step = (
        1..4_usize,
        any::<u32>(),
        booleans,
        medium,
        group,
        locality,
        image,
    );
    let step = step.prop_map(
        |(blocks, token, (eagle, array, remove), medium, group, locality, image)| Step {
            blocks,
            token: token >> 1,
            eagle,
            array,
            medium,
            group,
            locality,
            image,
            remove,
        },
    );
    prop::collection::vec(step, 1..6)
}

fn chains() -> impl Strategy<Value = Vec<Chain>> {
    let names = || prop::sample::select(vec![None, Some("a"), Some("b"), Some("")]);
    let chain =
        (names(), names(), any::<bool>(), steps()).prop_map(|(lora, salt, salt_as_key, steps)| {
            Chain {
                lora,
                salt,
                salt_as_key,
                steps,
            }
        });
    prop::collection::vec(chain, 1..4)
}

/// The batches of a chain, with hashes from `next` on. A step goes on from the last one that both sides
/// take; what is removed has no children.
fn payloads(chain: &Chain, next: &mut u64) -> Vec<Vec<u8>> {
    let mut parent: Option<u64> = None;
    let mut all = Vec::new();
    for step in &chain.steps {
        let mut step = step.clone();
        // On disk Dynamo neither filters groups nor hands the salt on: see the differences.
        let is_salted = chain.salt.is_some() && parent.is_some();
        if step.medium == Some("DISK") && (is_salted || step.group != (None, None)) {
            step.medium = Some("CPU");
        }
        let hashes: Vec<u64> = (0..step.blocks as u64)
            .map(|block| (*next + block).wrapping_mul(0x9e37_79b9_7f4a_7c15))
            .collect();
        *next += step.blocks as u64;
        let first = parent.is_none();
        all.push(batch(json!([stored(chain, &step, &hashes, parent, first)])));
        let counts = matches!(
            step.group,
            (
                None | Some(0),
                None | Some("full_attention" | "mla_attention")
            )
        );
        let taken = counts && step.medium != Some("FS") && step.locality != Some("REMOTE");
        if step.remove {
            let (group, kind) = step.group;
            let mut event = json!({"type": "BlockRemoved", "block_hashes": hashes,
                "medium": step.medium, "group_idx": group, "kv_cache_spec_kind": kind});
            if step.array {
                event = json!([
                    "BlockRemoved",
                    hashes,
                    step.medium,
                    group,
                    kind,
                    null,
                    step.locality
                ]);
            }
            all.push(batch(json!([event])));
        } else if taken && step.medium != Some("DISK") {
            parent = hashes.last().copied();
        }
    }
    all
}

fn stored(chain: &Chain, step: &Step, hashes: &[u64], parent: Option<u64>, first: bool) -> Value {
    let count = 4 * hashes.len();
    let token = |at: usize| step.token + u32::try_from(at).expect("a few");
    let tokens: Value = if step.eagle {
        (0..count)
            .map(|at| json!([token(at), token(at + 1)]))
            .collect()
    } else {
        (0..count).map(|at| json!(token(at))).collect()
    };
    let lora = chain.lora.filter(|name| !name.is_empty());
    let salt = chain.salt.filter(|_| first);
    let keys: Vec<Value> = (0..hashes.len())
        .map(|block| {
            let mut keys: Vec<Value> = lora.into_iter().map(|name| json!(name)).collect();
            if let Some((hash, _)) = step.image.filter(|(_, blocks)| blocks >> block & 1 == 1) {
                keys.push(json!([
                    format!("{hash:016x}{}", "0".repeat(48)),
                    4 - block as i64
                ]));
            }
            let told = salt.filter(|_| chain.salt_as_key && block == 0);
            keys.extend(told.map(|salt| json!(format!("dynamo-cache-salt:{salt}"))));
            if keys.is_empty() {
                Value::Null
            } else {
                json!(keys)
            }
        })
        .collect();
    let as_field = salt.filter(|_| !chain.salt_as_key);
    let (group, kind) = step.group;
    if step.array && (as_field.is_none() || chain.lora.is_none()) {
        let slot_7 = match as_field {
            Some(salt) => json!({"cache_salt": salt}),
            None => json!(chain.lora),
        };
        return json!([
            "BlockStored",
            hashes,
            parent,
            tokens,
            4,
            null,
            step.medium,
            slot_7,
            keys,
            group,
            kind,
            null,
            step.locality,
            null
        ]);
    }
    json!({"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent,
        "token_ids": tokens, "block_size": 4, "lora_id": null, "medium": step.medium,
        "lora_name": chain.lora, "cache_salt": as_field, "extra_keys": keys, "group_idx": group,
        "kv_cache_spec_kind": kind, "locality": step.locality})
}

proptest! {
    #[test]
    fn same_events_same_blocks(chains in chains(), clear in any::<bool>()) {
        let mut next = 1;
        let mut all: Vec<_> = chains.iter().flat_map(|chain| payloads(chain, &mut next)).collect();
        if clear {
            all.push(batch(json!([["AllBlocksCleared"], {"type": "AllBlocksCleared"}])));
        }
        prop_assert_eq!(by_us(&all, Dialect::Vllm), by_dynamo(&all));
    }
}

#[test]
fn payloads_of_vllm() {
    // See the differences below.
    let different = ["byte_hashes", "image_by_vllm", "salt_untagged"];
    for (name, payload) in all_of_vllm() {
        let ours = by_us(std::slice::from_ref(&payload), Dialect::Vllm);
        let theirs = by_dynamo(&[payload]);
        assert_eq!(
            ours == theirs,
            !different.contains(&name.as_str()),
            "{name}: {ours:?} {theirs:?}"
        );
    }
}

#[test]
fn payloads_of_sglang() {
    for (name, payload) in all_of_sglang() {
        let ours = by_us(std::slice::from_ref(&payload), Dialect::Sglang);
        assert_eq!(ours, by_dynamo(&[payload]), "{name}");
    }
}

#[test]
fn old_readers_ignore_the_source() {
    let event = |more: Value| {
        let mut event = json!({"type": "BlockStored", "block_hashes": [1],
            "parent_block_hash": null, "token_ids": [1, 2, 3, 4], "block_size": 4});
        let fields = event.as_object_mut().expect("a map");
        fields.extend(more.as_object().expect("a map").clone());
        vec![batch(json!([event]))]
    };
    let without = by_dynamo(&event(json!({})));
    assert!(matches!(without[..], [Some(ref made)] if matches!(made[..], [Made::Stored(..)])));
    assert_eq!(by_dynamo(&event(json!({"source": "transferred"}))), without);
}

/// Every difference: ours, theirs, and why.
#[test]
fn differences_on_purpose() {
    let root = json!(["BlockStored", [1], null, [1, 2, 3, 4], 4, null, "GPU", null]);
    let event = |more: Value| {
        let mut event = json!({"type": "BlockStored", "block_hashes": [2],
            "parent_block_hash": null, "token_ids": [5, 6, 7, 8], "block_size": 4,
            "medium": "GPU", "lora_name": null});
        let fields = event.as_object_mut().expect("a map");
        fields.extend(more.as_object().expect("a map").clone());
        event
    };
    let group = |group: u32, kind: &str| json!({"group_idx": group, "kv_cache_spec_kind": kind});
    let (vllm, sglang) = (Dialect::Vllm, Dialect::Sglang);

    let differences: Vec<(&str, Dialect, Vec<Value>, &str, &str)> = vec![
        (
            "a salted parent may be unknown: a child of it must not pass for unsalted",
            vllm,
            vec![event(json!({"parent_block_hash": 1}))],
            "stored 0",
            "stored 1",
        ),
        (
            "SGLang tells the salt with every block, so that none is none whatever the parent is",
            sglang,
            vec![
                event(json!({"block_hashes": [1], "cache_salt": "a"})),
                event(json!({"parent_block_hash": 1})),
            ],
            "stored 1 in base",
            "stored 1 in a",
        ),
        (
            "an unmarked salt or image decides the hash without being known",
            vllm,
            vec![event(json!({"extra_keys": [["tenant"]]}))],
            "nothing",
            "stored 1",
        ),
        (
            "so do prompt embeddings, whose tokens mean nothing",
            vllm,
            vec![event(json!({"extra_keys": [[1.5]]}))],
            "nothing",
            "stored 1",
        ),
        (
            "extra keys of other blocks than the event's belong to nobody knows which",
            vllm,
            vec![event(json!({"extra_keys": [null, null]}))],
            "nothing",
            "stored 1",
        ),
        (
            "an adapter without a name is not the base model",
            vllm,
            vec![event(json!({"lora_id": 3}))],
            "nothing",
            "stored 1",
        ),
        (
            "tokens that fill more or fewer blocks: which block is which cannot be said",
            vllm,
            vec![event(json!({"block_hashes": [2, 3]}))],
            "nothing",
            "stored 1",
        ),
        (
            "blocks of another size are no event, where Dynamo sends one without blocks",
            vllm,
            vec![event(json!({"block_size": 2, "block_hashes": [2, 3]}))],
            "nothing",
            "stored 0",
        ),
        (
            "engines offload by hash alone: the content is known from before",
            vllm,
            vec![event(
                json!({"token_ids": [], "block_size": 0, "medium": "CPU"}),
            )],
            "placed 1",
            "stored 0",
        ),
        (
            "pairs of tokens that are no neighbours have no sequence",
            vllm,
            vec![event(
                json!({"token_ids": [[5, 6], [9, 8], [7, 8], [8, 9]]}),
            )],
            "nothing",
            "stored 1",
        ),
        (
            "a second group of full attention would count as second copies",
            vllm,
            vec![
                event(group(0, "full_attention")),
                event(group(1, "full_attention")),
            ],
            "nothing",
            "stored 1",
        ),
        (
            "a group that does not count does not count on disk either",
            vllm,
            vec![event(
                json!({"group_idx": 3, "kv_cache_spec_kind": "mamba", "medium": "DISK"}),
            )],
            "nothing",
            "stored 1",
        ),
        (
            "a child on disk has its parent's salt as well",
            vllm,
            vec![
                event(json!({"block_hashes": [1], "cache_salt": "a"})),
                event(json!({"parent_block_hash": 1, "medium": "DISK"})),
            ],
            "stored 1 in a",
            "stored 1 in base",
        ),
        (
            "shared storage is held by no rank",
            vllm,
            vec![event(json!({"medium": "EXTERNAL"}))],
            "nothing",
            "stored 1",
        ),
        (
            "a hash twice in one run is left to the index, which refuses and counts it",
            vllm,
            vec![event(
                json!({"block_hashes": [2, 2], "token_ids": [1, 2, 3, 4, 5, 6, 7, 8]}),
            )],
            "stored 2",
            "removed 0",
        ),
        (
            "a removal of nothing is nothing",
            vllm,
            vec![json!(["BlockRemoved", []])],
            "nothing",
            "removed 0",
        ),
        (
            "session metadata of SGLang without a salt",
            sglang,
            vec![
                json!(["BlockStored", [1], null, [1, 2, 3, 4], 4, null, "GPU",
                {"session_id": "s1"}]),
            ],
            "stored 1",
            "batch lost",
        ),
        (
            "a newer type of event",
            vllm,
            vec![json!({"type": "BlockMoved"}), root.clone()],
            "stored 1",
            "batch lost",
        ),
        (
            "a broken neighbour",
            vllm,
            vec![json!(["BlockStored", "1"]), root.clone()],
            "stored 1",
            "batch lost",
        ),
    ];
    for (why, dialect, events, ours, theirs) in differences {
        let payload = [batch(json!(events))];
        assert_eq!(shown(&by_us(&payload, dialect), ours), ours, "{why}");
        assert_eq!(shown(&by_dynamo(&payload), theirs), theirs, "{why}");
    }
}

/// The last event of the last batch. `as_if` may ask for the namespace to be shown.
fn shown(made: &[Option<Vec<Made>>], as_if: &str) -> String {
    let Some(Some(events)) = made.last() else {
        return "batch lost".to_owned();
    };
    match events.last().expect("an event") {
        Made::Nothing => "nothing".to_owned(),
        Made::Placed(_, hashes) => format!("placed {}", hashes.len()),
        Made::Removed(_, hashes) => format!("removed {}", hashes.len()),
        Made::Cleared => "cleared".to_owned(),
        Made::Stored(_, _, blocks) if as_if.contains(" in ") => {
            let of = |salt| kvdelta_indexer::PromptOf {
                namespace: kvdelta_indexer::namespace(None, salt),
                ..kvdelta_indexer::PromptOf::default()
            };
            let is_of = |salt| {
                blocks[0].block == kvdelta_indexer::block_hashes(&[5, 6, 7, 8], four(), of(salt))[0]
            };
            let name = if is_of(None) {
                "base"
            } else if is_of(Some("a")) {
                "a"
            } else {
                "?"
            };
            format!("stored {} in {name}", blocks.len())
        }
        Made::Stored(_, _, blocks) => format!("stored {}", blocks.len()),
    }
}
