//! Bytes that nobody's engine sends: nothing panics, nothing grows beyond them, nobody else is touched.

use kvdelta_indexer::{
    BadBatch, Dialect, Normalized, Normalizer, Tier, WireBatch, WireEvent, WorkerRank,
    router_events,
};
use proptest::prelude::*;
use serde_json::json;

use crate::fleet::{Fleet, W1, all_of_vllm, batch, four};

/// How many things a payload was made into, which must not be more than its bytes.
fn elements(payload: &[u8]) -> usize {
    let Ok(batch) = WireBatch::decode(payload) else {
        return 0;
    };
    let of_event = |event| match event {
        Ok(WireEvent::Stored(stored)) => {
            let media: usize = stored.media.iter().map(|media| 1 + media.len()).sum();
            // Pairs of tokens overlap, so that two bytes of tokens make one.
            1 + stored.engine_hashes.len() + stored.tokens.len() + media
        }
        Ok(WireEvent::Removed { engine_hashes, .. }) => 1 + engine_hashes.len(),
        Ok(WireEvent::Cleared { .. }) | Err(_) => 1,
    };
    batch.events().map(of_event).sum()
}

proptest! {
    #[test]
    fn any_bytes(payload in proptest::collection::vec(any::<u8>(), 0..512)) {
        prop_assert!(elements(&payload) <= payload.len());
        if let Ok(events) = router_events(&payload) {
            prop_assert!(events.count() <= payload.len());
        }
    }

    /// Frames are right and the rest is noise, so that noise reaches the events.
    #[test]
    fn any_values(noise in proptest::collection::vec(any::<u8>(), 0..256), tag in 0..4_usize) {
        let (tag, len) = [("BlockStored", 0xab), ("BlockRemoved", 0xac), ("AllBlocksCleared", 0xb0), ("Other", 0xa5)][tag];
        let mut payload = vec![0x93, 0x00, 0x91, 0xdc, 0x00, 0x10, len];
        payload.extend(tag.as_bytes());
        payload.extend(&noise);
        payload.extend([0xc0; 20]);
        prop_assert!(elements(&payload) <= payload.len());
    }

    #[test]
    fn mutated_payloads_touch_nobody_else(
        which in 0..all_of_vllm().len(),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3_u8), 1..8),
    ) {
        let mut payload = all_of_vllm().swap_remove(which).1;
        for (at, byte, how) in changes {
            if payload.is_empty() {
                break;
            }
            let at = at.index(payload.len());
            match how {
                0 => payload[at] = byte,
                1 => payload.insert(at, byte),
                _ => {
                    payload.remove(at);
                }
            }
        }
        prop_assert!(elements(&payload) <= payload.len());

        let mut fleet = Fleet::new(Dialect::Vllm);
        let bystanders = [WorkerRank::new(1, 1), WorkerRank::new(2, 0)];
        for of in bystanders {
            fleet.admit(of);
            let mut normalizer = Normalizer::new(of, four(), Dialect::Vllm);
            for (_, payload) in all_of_vllm() {
                for event in WireBatch::decode(&payload).expect("a batch").events() {
                    let known = |engine| fleet.index.namespace_of(of, engine);
                    let done = normalizer.normalize(event.expect("an event"), known);
                    done.event.map(|event| fleet.index.apply(&event));
                }
            }
        }
        let before = bystanders.map(|of| fleet.index.held(of));
        // The rank may be among what was changed; it then speaks for itself.
        let speaks_for_other = WireBatch::decode(&payload)
            .is_ok_and(|batch| batch.rank == Some(bystanders[0].rank));
        let _ = fleet.try_publish(&payload);
        prop_assert_eq!(fleet.index.held(bystanders[1]), before[1].clone());
        if !speaks_for_other {
            prop_assert_eq!(fleet.index.held(bystanders[0]), before[0].clone());
        }
    }

    #[test]
    fn cut_short_is_broken(which in 0..all_of_vllm().len(), at in any::<prop::sample::Index>()) {
        let payload = all_of_vllm().swap_remove(which).1;
        let cut = at.index(payload.len());
        prop_assert_eq!(
            WireBatch::decode(&payload[..cut]).err(),
            Some(BadBatch::Broken(cut))
        );
    }
}

#[test]
fn a_length_that_lies_is_broken() {
    for header in [
        [0xdd, 0xff, 0xff, 0xff, 0xff],
        [0xdf, 0xff, 0xff, 0xff, 0xff],
        [0xdb, 0xff, 0xff, 0xff, 0xff],
        [0xc6, 0xff, 0xff, 0xff, 0xff],
        [0xc9, 0xff, 0xff, 0xff, 0xff],
    ] {
        let mut payload = vec![0x92, 0x00];
        payload.extend(header);
        payload.extend([0x00; 13]);
        let broken = BadBatch::Broken(payload.len());
        assert_eq!(WireBatch::decode(&payload).err(), Some(broken.clone()));
        assert_eq!(router_events(&payload).err(), Some(broken));
    }
}

#[test]
fn depth_costs_no_stack() {
    let depth = 1_000_000;
    for header in [0x91, 0x81] {
        let mut payload = vec![0x92, 0x00, 0x91];
        payload.resize(depth, header);
        // A map needs a value for every key.
        payload.resize(2 * depth, 0xc0);
        let Ok(batch) = WireBatch::decode(&payload) else {
            continue;
        };
        let skipped: Vec<_> = batch.events().filter_map(Result::err).collect();
        assert_eq!(skipped.len(), 1);
        assert_eq!(skipped[0].as_label(), "malformed");
    }
}

#[test]
fn the_largest_hashes_are_hashes() {
    let all = [u64::MAX, u64::MAX - 1, 1 << 63, 0];
    let mut fleet = Fleet::new(Dialect::Vllm);
    let tokens: Vec<u32> = (0..12).map(|token| u32::MAX - token).collect();
    let event = json!([
        "BlockStored",
        all[..3],
        all[3],
        tokens,
        4,
        null,
        "GPU",
        null
    ]);
    let root = json!([
        "BlockStored",
        [all[3]],
        null,
        [1, 2, 3, 4],
        4,
        null,
        "GPU",
        null
    ]);
    assert!(fleet.events(json!([root, event])).is_empty());
    let all_tokens: Vec<u32> = [1, 2, 3, 4].into_iter().chain(tokens).collect();
    assert_eq!(fleet.q(&all_tokens), 4);
}

#[test]
fn a_million_blocks_in_one_event() {
    let blocks: u32 = 1_000_000;
    let hashes: Vec<u64> = (0..u64::from(blocks)).map(|hash| hash << 32).collect();
    let tokens: Vec<u32> = (0..4 * blocks).collect();
    let event = json!(["BlockStored", hashes, null, tokens, 4, null, "GPU", null]);
    let payload = batch(json!([event]));
    assert!(elements(&payload) <= payload.len());
    let batch = WireBatch::decode(&payload).expect("a batch");
    let event = batch.events().next().expect("one").expect("an event");
    let done = Normalizer::new(W1, four(), Dialect::Vllm).normalize(event, |_| None);
    let Normalized {
        event: Some(event),
        skipped: None,
    } = done
    else {
        panic!("{:?}", done.skipped);
    };
    let kvdelta_indexer::Change::Stored(stored) = event.change else {
        panic!("{:?}", event.of);
    };
    assert_eq!(stored.blocks.len(), 1_000_000);
    assert_eq!(stored.tier, Tier::Device);
}

#[test]
fn ten_thousand_ranks_that_nobody_admitted() {
    let mut fleet = Fleet::new(Dialect::Vllm);
    for rank in 1..=10_000 {
        let event = json!(["BlockStored", [1], null, [1, 2, 3, 4], 4, null, "GPU", null]);
        let payload = rmp_serde::to_vec(&(0.0, json!([event]), rank)).expect("MessagePack");
        assert!(fleet.publish(&payload).is_empty());
    }
    assert_eq!(fleet.refused.len(), 10_000);
    assert_eq!(fleet.index.ranks(), [W1]);
}

#[test]
fn ten_thousand_groups_leave_nothing_behind() {
    let mut fleet = Fleet::new(Dialect::Vllm);
    for group in 0..10_000 {
        let place = json!({"type": "BlockStored", "block_hashes": [1], "token_ids": [1, 2, 3, 4],
            "block_size": 4, "group_idx": group, "kv_cache_spec_kind": "full_attention"});
        let skipped = fleet.events(json!([place]));
        assert_eq!(skipped.is_empty(), group == 0, "{group}: {skipped:?}");
    }
    assert_eq!(fleet.q(&[1, 2, 3, 4]), 1);
}
