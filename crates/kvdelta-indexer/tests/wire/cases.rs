//! Public faults of systems like this one, each with the right value: the decoding half of B01, B02,
//! B11, B13, B14, B16, B17.

use kvdelta_indexer::{
    BadBatch, CacheGroups, Dialect, EngineHash, MediaHash, PromptOf, Refused, Source, Tier,
    WireBatch, WireEvent, WorkerRank,
};
use serde_json::{Value, json};

use crate::fleet::{Fleet, W1, batch, bytes, of_vllm};

/// `BlockStored` of the named encoding, blocks of 4.
fn stored(hashes: &[u64], parent: Option<u64>, tokens: &[u32], more: Value) -> Value {
    let mut event = json!({
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent,
        "token_ids": tokens, "block_size": 4, "lora_id": null, "medium": "GPU", "lora_name": null,
    });
    let fields = event.as_object_mut().expect("a map");
    fields.extend(more.as_object().expect("a map").clone());
    event
}

fn removed(hashes: &[u64], medium: Option<&str>) -> Value {
    json!({"type": "BlockRemoved", "block_hashes": hashes, "medium": medium})
}

fn range(tokens: std::ops::RangeInclusive<u32>) -> Vec<u32> {
    tokens.collect()
}

#[test]
fn b01_maps_and_arrays() {
    let map = "93cb00000000000000009188a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739164\
        b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6504a7\
        6c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c000";
    let array = "93cb00000000000000009198ab426c6f636b53746f7265649164c0940102030404c0a3475055c000";
    for payload in [map, array] {
        let mut fleet = Fleet::new(Dialect::Vllm);
        assert_eq!(fleet.publish(&bytes(payload)), []);
        assert_eq!(fleet.q(&[1, 2, 3, 4]), 1, "{payload}");
        let (_, engine) = fleet.overlap(W1, Tier::Device, &[1, 2, 3, 4], PromptOf::default());
        assert_eq!(engine, Some(EngineHash(100)));
    }
}

#[test]
fn b01_mixed_batch_with_what_is_newer_than_this_decoder() {
    let mut fleet = Fleet::new(Dialect::Vllm);
    let skipped = fleet.events(json!([
        stored(&[100], None, &[1, 2, 3, 4], json!({"key_of_tomorrow": {"a": [1, null]}})),
        ["BlockStored", [101], 100, [5, 6, 7, 8], 4, null, "GPU", null],
        {"type": "BlockMoved", "block_hashes": [100]},
        ["BlockPinned", [100]],
        stored(&[102], Some(101), &[9, 10, 11, 12], json!({"remaining_copy_counts": [1]})),
    ]));
    assert_eq!(skipped, ["unknown_type", "unknown_type"]);
    assert_eq!(fleet.q(&range(1..=12)), 3);
    assert!(
        fleet
            .events(json!([{"type": "AllBlocksCleared"}]))
            .is_empty()
    );
    assert_eq!(fleet.q(&range(1..=12)), 0);
}

#[test]
fn b02_metadata_of_sglang_in_the_slot_of_the_adapter() {
    let session = "93cb00000000000000009298ab426c6f636b53746f7265649164c0940102030404c0a3475055c098ab\
        426c6f636b53746f726564916564940506070804c0a347505581aa73657373696f6e5f6964a2733100";
    let mut fleet = Fleet::new(Dialect::Sglang);
    assert_eq!(fleet.publish(&bytes(session)), []);
    assert_eq!(fleet.q(&range(1..=8)), 2, "a session is no salt");

    let good = json!([
        "BlockStored",
        [100],
        null,
        [1, 2, 3, 4],
        4,
        null,
        "GPU",
        null
    ]);
    let salted =
        json!(["BlockStored", [101], null, [5, 6, 7, 8], 4, null, "GPU", {"cache_salt": "t1"}]);
    let mut fleet = Fleet::new(Dialect::Sglang);
    assert!(fleet.events(json!([good, salted])).is_empty());
    assert_eq!(fleet.q(&[1, 2, 3, 4]), 1);
    assert_eq!(fleet.q(&[5, 6, 7, 8]), 0);
    assert_eq!(fleet.q_in(&[5, 6, 7, 8], None, Some("t1")), 1);
    assert_eq!(fleet.q_in(&[5, 6, 7, 8], Some("t1"), None), 0);
}

#[test]
fn b02_a_broken_event_is_skipped_alone_and_lowers_trust() {
    let good = json!([
        "BlockStored",
        [100],
        null,
        [1, 2, 3, 4],
        4,
        null,
        "GPU",
        null
    ]);
    let next = json!([
        "BlockStored",
        [101],
        100,
        [5, 6, 7, 8],
        4,
        null,
        "GPU",
        null
    ]);
    for broken in [
        json!([
            "BlockStored",
            "101",
            100,
            [5, 6, 7, 8],
            4,
            null,
            "GPU",
            null
        ]),
        json!([
            "BlockStored",
            [101],
            100,
            [5, 6, 7, "8"],
            4,
            null,
            "GPU",
            null
        ]),
        json!([
            "BlockStored",
            [101],
            100,
            [5, 6, 7, -8],
            4,
            null,
            "GPU",
            null
        ]),
        json!([
            "BlockStored",
            [101],
            100,
            [5, 6, 7, 1_u64 << 32],
            4,
            null,
            "GPU",
            null
        ]),
        json!([
            "BlockStored",
            [101],
            100,
            [[5, 6], [7, 8]],
            4,
            null,
            "GPU",
            null
        ]),
        json!(["BlockStored", [101], 100, [[5, 6, 7]], 4, null, "GPU", null]),
        json!(["BlockStored", [101]]),
        json!(["BlockStored"]),
        json!({"type": "BlockRemoved"}),
        json!({"type": 7}),
        json!({}),
        json!([]),
        json!(null),
        json!(12),
    ] {
        let mut fleet = Fleet::new(Dialect::Sglang);
        let skipped = fleet.publish(&batch(json!([good, broken, next])));
        assert_eq!(skipped.len(), 1, "{broken}: {skipped:?}");
        assert!(skipped[0].may_hide_changes(), "{}", skipped[0]);
        assert_eq!(fleet.q(&range(1..=8)), 2, "{broken}");
    }
}

#[test]
fn b11_a_state_group_does_not_touch_the_attention_group() {
    let tokens = range(1..=20);
    let state = stored(
        &[5],
        None,
        &tokens,
        json!({"group_idx": 0, "kv_cache_spec_kind": "mamba"}),
    );
    let attention = stored(
        &[1, 2, 3, 4, 5],
        None,
        &tokens,
        json!({"group_idx": 1, "kv_cache_spec_kind": "full_attention"}),
    );
    for events in [[&state, &attention], [&attention, &state]] {
        let mut fleet = Fleet::new(Dialect::Vllm);
        assert_eq!(fleet.events(json!(events)), ["unsupported_kind"]);
        assert_eq!(fleet.q(&tokens), 5);
        for group in [0, 7] {
            let event = json!(
                {"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU", "group_idx": group}
            );
            assert_eq!(fleet.events(json!([event])), ["unsupported_group"]);
            assert_eq!(fleet.q(&tokens), 5, "after the removal in group {group}");
        }
        assert_eq!(fleet.groups(), CacheGroups::Hybrid);
    }
    let mut fleet = Fleet::new(Dialect::Vllm);
    assert_eq!(
        fleet
            .publish(&of_vllm("hybrid"))
            .iter()
            .map(|why| why.as_label())
            .collect::<Vec<_>>(),
        ["unsupported_kind", "unsupported_group", "unsupported_group"]
    );
    assert_eq!(fleet.q(&tokens), 5);
}

#[test]
fn b11_one_hash_is_never_zipped_with_a_chunk() {
    // The group's kind got lost: the counts alone have to tell.
    let mut fleet = Fleet::new(Dialect::Vllm);
    let skipped = fleet.events(json!([stored(&[5], None, &range(1..=20), json!({}))]));
    assert_eq!(skipped, ["count_mismatch"]);
    assert_eq!(fleet.q(&[1, 2, 3, 4]), 0);
}

#[test]
fn b11_second_attention_group_is_no_second_copy() {
    let of_group = |group: u32| {
        stored(
            &[1],
            None,
            &[1, 2, 3, 4],
            json!({"group_idx": group, "kv_cache_spec_kind": "full_attention"}),
        )
    };
    let mut fleet = Fleet::new(Dialect::Vllm);
    assert_eq!(fleet.groups(), CacheGroups::Unknown);
    assert!(fleet.events(json!([of_group(0)])).is_empty());
    assert_eq!(fleet.groups(), CacheGroups::MainOnly);
    assert_eq!(fleet.events(json!([of_group(1)])), ["unsupported_group"]);
    assert_eq!(fleet.groups(), CacheGroups::Hybrid);
    fleet.events(json!([{"type": "BlockRemoved", "block_hashes": [1], "group_idx": 0}]));
    assert_eq!(fleet.q(&[1, 2, 3, 4]), 0);
}

#[test]
fn b11_a_further_group_makes_the_model_hybrid_though_its_kind_is_not_told() {
    let of_group = |group: u32| stored(&[1], None, &[1, 2, 3, 4], json!({"group_idx": group}));
    let mut fleet = Fleet::new(Dialect::Vllm);
    assert!(fleet.events(json!([of_group(0)])).is_empty());
    assert_eq!(fleet.groups(), CacheGroups::Unknown, "a plain model");
    assert_eq!(fleet.events(json!([of_group(1)])), ["unsupported_group"]);
    assert_eq!(fleet.groups(), CacheGroups::Hybrid);
    // Its own eviction does not show in the group that counts.
    fleet.events(json!([{"type": "BlockRemoved", "block_hashes": [1], "group_idx": 1}]));
    assert_eq!(fleet.q(&[1, 2, 3, 4]), 1);
}

#[test]
fn b13_only_the_device_counts_for_a_skip() {
    let tokens = [1, 2, 3, 4];
    let device = stored(&[1], None, &tokens, json!({}));
    let host = json!({"type": "BlockStored", "block_hashes": [1], "parent_block_hash": null,
        "token_ids": [], "block_size": 0, "lora_id": null, "medium": "CPU", "lora_name": null});
    let hold = |fleet: &Fleet| {
        [Tier::Device, Tier::Host].map(|tier| {
            let (blocks, _) = fleet.overlap(W1, tier, &tokens, PromptOf::default());
            blocks
        })
    };
    let mut fleet = Fleet::new(Dialect::Vllm);
    assert!(fleet.events(json!([device, host])).is_empty());
    assert_eq!(hold(&fleet), [1, 1]);
    assert!(fleet.events(json!([removed(&[1], Some("CPU"))])).is_empty());
    assert_eq!(hold(&fleet), [1, 0]);
    assert!(fleet.events(json!([removed(&[1], Some("GPU"))])).is_empty());
    assert_eq!(hold(&fleet), [0, 0]);

    let mut fleet = Fleet::new(Dialect::Vllm);
    fleet.events(json!([device, host, removed(&[1], Some("GPU"))]));
    assert_eq!(hold(&fleet), [0, 1]);
    fleet.events(json!([removed(&[1], Some("CPU"))]));
    assert_eq!(hold(&fleet), [0, 0]);
}

#[test]
fn b13_other_media_and_localities_harm_nothing() {
    for (more, label) in [
        (json!({"medium": "FS"}), Some("unknown_medium")),
        (json!({"medium": "OBJ"}), Some("unknown_medium")),
        (json!({"medium": "EXTERNAL"}), Some("shared_storage")),
        (json!({"locality": "REMOTE"}), Some("remote_locality")),
        (json!({"locality": "NEARBY"}), Some("remote_locality")),
        (json!({"ownership": "kvcr"}), Some("unsupported_ownership")),
        (
            json!({"medium": "CPU", "ownership": "l2"}),
            Some("unknown_ownership"),
        ),
        (json!({"locality": "LOCAL"}), None),
        (json!({"medium": null}), None),
        (json!({"medium": ""}), None),
    ] {
        let mut fleet = Fleet::new(Dialect::Vllm);
        let first = stored(&[1], None, &[1, 2, 3, 4], json!({}));
        let second = stored(&[2], Some(1), &[5, 6, 7, 8], more.clone());
        let third = stored(&[3], Some(1), &[9, 9, 9, 9], json!({}));
        let skipped = fleet.publish(&batch(json!([first, second, third])));
        assert_eq!(skipped.first().map(|why| why.as_label()), label, "{more}");
        assert!(skipped.iter().all(|why| !why.may_hide_changes()), "{more}");
        assert_eq!(fleet.q(&range(1..=8)), 2 - skipped.len(), "{more}");
        assert_eq!(fleet.q(&[1, 2, 3, 4, 9, 9, 9, 9]), 2, "{more}");
    }
    // Whoever owns blocks on the device under a name of tomorrow, their removal may have been ours.
    let mut fleet = Fleet::new(Dialect::Vllm);
    let event = json!({"type": "AllBlocksCleared", "ownership": "tomorrow"});
    assert!(fleet.publish(&batch(json!([event])))[0].may_hide_changes());
}

#[test]
fn b14_the_rank_in_the_batch_goes_before_the_socket() {
    let rank_1 = WorkerRank::new(1, 1);
    let mut fleet = Fleet::new(Dialect::Vllm);
    fleet.admit(rank_1);
    assert_eq!(fleet.publish(&of_vllm("rank_1")), []);
    assert_eq!(fleet.q(&range(1..=8)), 0);
    let of_it = fleet.overlap(rank_1, Tier::Device, &range(1..=8), PromptOf::default());
    assert_eq!(of_it.0, 2);

    let payload = rmp_serde::to_vec(&(0.0, json!([]), -1)).expect("MessagePack");
    let error = WireBatch::decode(&payload).expect_err("no rank");
    assert_eq!(
        error.to_string(),
        "rank of a batch of KV events is a signed integer"
    );
}

#[test]
fn b16_the_salt_comes_with_the_first_block_only() {
    let first = stored(
        &[1],
        None,
        &[1, 2, 3, 4],
        json!({"cache_salt": "A", "extra_keys": null}),
    );
    let marked = stored(
        &[1],
        None,
        &[1, 2, 3, 4],
        json!({"extra_keys": [["dynamo-cache-salt:A"]]}),
    );
    let second = stored(&[2], Some(1), &[5, 6, 7, 8], json!({"extra_keys": [null]}));
    let tokens = range(1..=8);
    for first in [first, marked] {
        let mut fleet = Fleet::new(Dialect::Vllm);
        assert!(fleet.events(json!([first])).is_empty());
        assert!(fleet.events(json!([second])).is_empty());
        assert_eq!(fleet.q_in(&tokens, None, Some("A")), 2);
        assert_eq!(fleet.q_in(&tokens, None, Some("B")), 0);
        assert_eq!(fleet.q(&tokens), 0);
        assert_eq!(fleet.q_in(&tokens, Some("A"), None), 0);
    }
    let mut fleet = Fleet::new(Dialect::Vllm);
    assert_eq!(fleet.publish(&of_vllm("salt_by_dynamo_in_two_steps")), []);
    assert_eq!(fleet.q_in(&tokens, None, Some("A")), 2);
    assert_eq!(fleet.q(&tokens), 0);
}

#[test]
fn b16_joined_in_mid_chain_the_namespace_is_unknown() {
    let mut fleet = Fleet::new(Dialect::Vllm);
    let second = stored(&[2], Some(1), &[5, 6, 7, 8], json!({"extra_keys": [null]}));
    assert_eq!(fleet.events(json!([second])), ["unknown_namespace"]);
    assert_eq!(fleet.refused, [Refused::UnknownParent]);
    assert_eq!(fleet.q(&[5, 6, 7, 8]), 0);
    assert_eq!(fleet.q(&range(1..=8)), 0);
    assert!(fleet.index.held(W1).is_empty());
    // Heard later, the parent does not adopt it.
    fleet.events(json!([stored(&[1], None, &[1, 2, 3, 4], json!({}))]));
    assert_eq!(fleet.q(&range(1..=8)), 1);
}

#[test]
fn b16_empty_salt_is_no_salt() {
    let tokens = [1, 2, 3, 4];
    let mut fleet = Fleet::new(Dialect::Vllm);
    fleet.events(json!([stored(
        &[1],
        None,
        &tokens,
        json!({"cache_salt": ""})
    )]));
    assert_eq!(fleet.q(&tokens), 1);
    assert_eq!(fleet.q_in(&tokens, None, Some("")), 1);

    let mut fleet = Fleet::new(Dialect::Vllm);
    let keys = json!({"extra_keys": [["dynamo-cache-salt:"]]});
    fleet.events(json!([stored(&[1], None, &tokens, keys)]));
    assert_eq!(fleet.q(&tokens), 1);
}

#[test]
fn b16_adapter_and_salt_of_one_name() {
    let tokens = range(1..=8);
    let mut fleet = Fleet::new(Dialect::Vllm);
    assert_eq!(fleet.publish(&of_vllm("lora")), []);
    assert_eq!(fleet.q_in(&tokens, Some("A"), None), 2);
    assert_eq!(fleet.q_in(&tokens, None, Some("A")), 0);
    assert_eq!(fleet.publish(&of_vllm("lora_and_salt_of_one_name")), []);
    assert_eq!(fleet.q_in(&tokens, Some("A"), Some("A")), 2);
    assert_eq!(fleet.q_in(&tokens, None, Some("A")), 0);
    assert_eq!(fleet.q(&tokens), 0);
}

#[test]
fn b16_what_cannot_be_attributed_is_not_unsalted() {
    let tokens = range(1..=8);
    let mut fleet = Fleet::new(Dialect::Vllm);
    let skipped = fleet.publish(&of_vllm("salt_untagged"));
    assert_eq!(
        skipped[0].to_string(),
        "extra key A of block 0 cannot be attributed"
    );
    assert_eq!(fleet.q(&tokens), 0);
    assert_eq!(fleet.q_in(&tokens, None, Some("A")), 0);

    for (more, label) in [
        (
            json!({"extra_keys": [["dynamo-cache-salt:A"], ["dynamo-cache-salt:B"]]}),
            "unattributed_key",
        ),
        (json!({"extra_keys": [[7], null]}), "unattributed_key"),
        (
            json!({"extra_keys": [[["x", 0, 0]], null]}),
            "unattributed_key",
        ),
        (
            json!({"extra_keys": [["A", "A"], ["A"]], "lora_name": "A"}),
            "unattributed_key",
        ),
        (json!({"extra_keys": [null]}), "malformed"),
        (json!({"lora_id": 3}), "unnamed_lora"),
        (json!({"lora_id": "9f3a"}), "unnamed_lora"),
    ] {
        let mut fleet = Fleet::new(Dialect::Vllm);
        let event = stored(&[1, 2], None, &tokens, more.clone());
        assert_eq!(fleet.events(json!([event])), [label], "{more}");
        assert_eq!(fleet.q(&tokens), 0, "{more}");
    }
}

#[test]
fn b17_another_image_is_another_block() {
    let tokens = [1, 2, 3, 4, 9, 9, 9, 9, 9, 9, 9, 9];
    let (a, b) = (MediaHash(0xA0001), MediaHash(0xB0001));
    let mut fleet = Fleet::new(Dialect::Vllm);
    assert_eq!(fleet.publish(&of_vllm("image_of_dynamo")), []);
    assert_eq!(fleet.q_with(&tokens, &[vec![], vec![a], vec![a]]), 3);
    assert_eq!(fleet.q_with(&tokens, &[vec![], vec![b], vec![b]]), 1);
    assert_eq!(fleet.q_with(&tokens, &[vec![], vec![], vec![a]]), 1);
    assert_eq!(fleet.q(&tokens), 1);

    assert_eq!(fleet.publish(&of_vllm("other_image_of_dynamo")), []);
    assert_eq!(fleet.q_with(&tokens, &[vec![], vec![b], vec![b]]), 3);
    assert_eq!(fleet.q_with(&tokens, &[vec![], vec![a], vec![b]]), 2);

    let infos = json!([null, {"mm_objects": [{"mm_hash": 0xA0001, "offsets": [[0, 4]]}]},
        {"mm_objects": [{"mm_hash": 0xA0001, "offsets": []}]}]);
    let mut fleet = Fleet::new(Dialect::Vllm);
    let event = stored(&[1, 2, 3], None, &tokens, json!({"block_mm_infos": infos}));
    assert!(fleet.events(json!([event])).is_empty());
    assert_eq!(fleet.q_with(&tokens, &[vec![], vec![a], vec![a]]), 3);
    assert_eq!(fleet.q(&tokens), 1);
}

#[test]
fn b17_an_image_that_the_router_cannot_name_ends_the_prefix() {
    let tokens = [1, 2, 3, 4, 9, 9, 9, 9, 9, 9, 9, 9];
    let mut fleet = Fleet::new(Dialect::Vllm);
    let skipped = fleet.publish(&of_vllm("image_by_vllm"));
    assert_eq!(skipped[0].as_label(), "unattributed_key");
    assert!(!skipped[0].may_hide_changes());
    assert_eq!(fleet.q(&tokens), 1, "the text before it is held");
    assert_eq!(fleet.index.held(W1).len(), 1);
}

#[test]
fn vllm_by_integers_and_bytes_names_blocks_alike() {
    let tokens = range(1..=12);
    let [integers, bytes] = ["text", "byte_hashes"].map(|name| {
        let mut fleet = Fleet::new(Dialect::Vllm);
        assert_eq!(fleet.publish(&of_vllm(name)), []);
        assert_eq!(fleet.q(&tokens), 3);
        assert_eq!(fleet.groups(), CacheGroups::MainOnly);
        fleet.index.held(W1)
    });
    assert_eq!(integers, bytes);
}

#[test]
fn signed_and_unsigned_hashes_are_the_same_bits() {
    let mut fleet = Fleet::new(Dialect::Sglang);
    let signed = json!(["BlockStored", [-1], null, [1, 2, 3, 4], 4, null, "GPU"]);
    let unsigned = json!(["BlockStored", [1], u64::MAX, [5, 6, 7, 8], 4, null, "GPU"]);
    assert!(fleet.events(json!([signed, unsigned])).is_empty());
    assert_eq!(fleet.q(&range(1..=8)), 2);
    assert!(fleet.events(json!([removed(&[u64::MAX], None)])).is_empty());
    assert_eq!(fleet.q(&range(1..=8)), 0);
}

#[test]
fn vllm_counts_copies_and_sglang_does_not() {
    let tokens = range(1..=8);
    let mut fleet = Fleet::new(Dialect::Vllm);
    assert_eq!(fleet.publish(&of_vllm("two_copies")), []);
    assert_eq!(fleet.publish(&of_vllm("first_copy_evicted")), []);
    assert_eq!(fleet.q(&tokens), 2);
    assert_eq!(fleet.publish(&of_vllm("first_copy_evicted")), []);
    assert_eq!(fleet.q(&tokens), 1);
    assert_eq!(fleet.publish(&of_vllm("cleared")), []);
    assert_eq!(fleet.q(&tokens), 0);

    let mut fleet = Fleet::new(Dialect::Sglang);
    assert_eq!(fleet.publish(&of_vllm("two_copies")), []);
    assert_eq!(fleet.publish(&of_vllm("first_copy_evicted")), []);
    assert_eq!(fleet.q(&tokens), 1);
}

#[test]
fn sglang_tells_the_salt_with_every_block() {
    // Salted and unsalted chains of SGLang share their hashes, so that a child without a salt is
    // unsalted whatever is known of its parent.
    let mut fleet = Fleet::new(Dialect::Sglang);
    let salted = stored(&[1], None, &[1, 2, 3, 4], json!({"cache_salt": "t1"}));
    let plain = stored(&[2], Some(1), &[5, 6, 7, 8], json!({"session_id": "s1"}));
    fleet.events(json!([salted, plain]));
    assert_eq!(fleet.q_in(&range(1..=8), None, Some("t1")), 1);
    assert_eq!(fleet.q(&range(1..=8)), 0);
}

#[test]
fn pairs_of_tokens_are_hashed_with_the_token_behind() {
    let pairs: Vec<_> = (1..=8).map(|token| json!([token, token + 1])).collect();
    let event = json!(["BlockStored", [1, 2], null, pairs, 4, null, "GPU"]);
    let mut fleet = Fleet::new(Dialect::Sglang);
    assert!(fleet.events(json!([event])).is_empty());
    let eagle = PromptOf {
        eagle: true,
        ..PromptOf::default()
    };
    assert_eq!(fleet.overlap(W1, Tier::Device, &range(1..=9), eagle).0, 2);
    assert_eq!(fleet.q(&range(1..=9)), 0);
}

#[test]
fn sizes_that_do_not_fit_store_nothing() {
    let tokens = range(1..=8);
    for (size, hashes, label) in [
        (0, 2, "block_size_mismatch"),
        (2, 4, "block_size_mismatch"),
        (8, 1, "block_size_mismatch"),
        (4, 1, "count_mismatch"),
        (4, 3, "count_mismatch"),
        (4, 0, "count_mismatch"),
    ] {
        let mut fleet = Fleet::new(Dialect::Vllm);
        let hashes: Vec<u64> = (1..=hashes).collect();
        let event = stored(&hashes, None, &tokens, json!({"block_size": size}));
        assert_eq!(fleet.events(json!([event])), [label], "{size}, {hashes:?}");
        assert!(fleet.index.held(W1).is_empty());
    }
}

#[test]
fn source_is_kept_and_what_is_not_understood_is_not_said() {
    for (source, kept) in [
        (json!("local"), Some(Source::Local)),
        (json!("transferred"), Some(Source::Transferred)),
        (json!("stolen"), None),
        (json!(7), None),
        (json!(null), None),
    ] {
        let event = stored(&[1], None, &[1, 2, 3, 4], json!({"source": source}));
        let payload = batch(json!([event]));
        let batch = WireBatch::decode(&payload).expect("a batch");
        let event = batch.events().next().expect("one").expect("an event");
        let WireEvent::Stored(stored) = event else {
            panic!("{event:?}");
        };
        assert_eq!(stored.source, kept, "{source}");
    }
}

#[test]
fn a_batch_whose_frame_is_broken_is_an_error_that_names_it() {
    for (payload, error) in [
        (
            vec![],
            "a batch of KV events that is cut short or no MessagePack, 0 bytes",
        ),
        (
            vec![0xc1],
            "a batch of KV events that is cut short or no MessagePack, 1 bytes",
        ),
        (
            bytes("93cb0000"),
            "a batch of KV events that is cut short or no MessagePack, 4 bytes",
        ),
        (bytes("80"), "whole of a batch of KV events is a map"),
        (bytes("9100"), "events of a batch of KV events is nothing"),
        (bytes("92a05f"), "time of a batch of KV events is a string"),
        (bytes("920080"), "events of a batch of KV events is a map"),
        (
            bytes("930090a0"),
            "rank of a batch of KV events is a string",
        ),
    ] {
        let found: BadBatch = WireBatch::decode(&payload).expect_err(error);
        assert_eq!(found.to_string(), error);
    }
    let newer = bytes("94009003c0");
    let batch = WireBatch::decode(&newer).expect("an engine of tomorrow");
    assert_eq!((batch.len(), batch.rank.map(|rank| rank.0)), (0, Some(3)));
    assert!(batch.is_empty());
}
