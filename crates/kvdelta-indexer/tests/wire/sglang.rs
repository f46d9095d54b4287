//! What SGLang 0.5.21 publishes, as its own radix tree and encoder wrote it
//! (`tests/engines/sglang_event_fixtures.py`). Its numbers are those of the engine: docs/sglang.md.

use kvdelta_indexer::{Dialect, PromptOf, Refused, Tier, WorkerRank};

use crate::fleet::{Fleet, W1, of_sglang};

/// The prompt of most payloads, and another with the same first two blocks.
const TEXT: [u32; 12] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];
const OTHER_END: [u32; 12] = [1, 2, 3, 4, 5, 6, 7, 8, 21, 22, 23, 24];

fn fleet(payloads: &[&str]) -> Fleet {
    let mut fleet = Fleet::new(Dialect::Sglang);
    for name in payloads {
        assert_eq!(fleet.publish(&of_sglang(name)), [], "{name}");
    }
    fleet
}

#[test]
fn b10_a_split_node_keeps_its_blocks() {
    let mut fleet = fleet(&["text", "split_by_another_end"]);
    assert_eq!((fleet.q(&TEXT), fleet.q(&OTHER_END)), (3, 3));
    assert_eq!(fleet.index.held(W1).len(), 4);
    for (payload, text, other) in [
        ("both_ends_evicted", 2, 2),
        ("first_end_again", 3, 2),
        ("cleared", 0, 0),
    ] {
        assert_eq!(fleet.publish(&of_sglang(payload)), []);
        assert_eq!(
            (fleet.q(&TEXT), fleet.q(&OTHER_END)),
            (text, other),
            "{payload}"
        );
    }
    assert_eq!(fleet.refused, []);
}

#[test]
fn b10_who_comes_after_the_split_bridges_no_hole() {
    let mut fleet = fleet(&["split_by_another_end"]);
    assert_eq!((fleet.q(&TEXT), fleet.q(&OTHER_END)), (0, 0));
    assert!(
        matches!(fleet.refused.as_slice(), [Refused::UnknownParent]),
        "{:?}",
        fleet.refused
    );
    // The replay brings the parent.
    for payload in ["text", "split_by_another_end"] {
        fleet.publish(&of_sglang(payload));
    }
    assert_eq!((fleet.q(&TEXT), fleet.q(&OTHER_END)), (3, 3));
}

#[test]
fn b14_the_rank_of_the_batch_counts() {
    let mut fleet = Fleet::new(Dialect::Sglang);
    let second = WorkerRank::new(1, 1);
    fleet.admit(second);
    assert_eq!(fleet.publish(&of_sglang("rank_1")), []);
    let of = |rank| fleet.overlap(rank, Tier::Device, &TEXT, PromptOf::default());
    assert_eq!((of(W1).0, of(second).0), (0, 3));
}

#[test]
fn b16_a_salt_is_a_namespace() {
    let salted = fleet(&["salt"]);
    assert_eq!(salted.q_in(&TEXT, None, Some("A")), 3);
    for (lora, salt) in [(None, None), (None, Some("B")), (Some("A"), None)] {
        assert_eq!(salted.q_in(&TEXT, lora, salt), 0, "{lora:?} {salt:?}");
    }
    // Both side by side, since their hashes differ, and each is found as its own.
    let both = fleet(&["salt", "text"]);
    assert_eq!((both.q(&TEXT), both.q_in(&TEXT, None, Some("A"))), (3, 3));
    let engine = |salt| {
        let of = PromptOf {
            namespace: kvdelta_indexer::namespace(None, salt),
            ..PromptOf::default()
        };
        both.overlap(W1, Tier::Device, &TEXT, of).1
    };
    assert_ne!(engine(None), engine(Some("A")));
}

/// SGLang neither tells a request's `extra_key`, which is how it keeps adapters apart, nor lets it into the
/// hash that it publishes: to a router these blocks are the base model's. Hence only D's own number counts.
#[test]
fn b16_an_extra_key_cannot_be_seen() {
    assert_eq!(of_sglang("extra_key"), of_sglang("text"));
}

/// What the window layers gave up is told nowhere. Of `first` D itself would reuse nothing, which the fixture
/// asserts: it has the pages that both prompts share, without the window at their end.
#[test]
fn b28_a_lost_window_cannot_be_seen() {
    let first: Vec<u32> = (1..=24).collect();
    let second: Vec<u32> = (1..=16).chain(31..=38).collect();
    let mut fleet = fleet(&["with_sliding_window"]);
    assert_eq!((fleet.q(&first), fleet.q(&second)), (6, 6));
    assert_eq!(fleet.publish(&of_sglang("window_evicted")), []);
    assert_eq!((fleet.q(&first), fleet.q(&second)), (4, 6));
}

#[test]
fn a_copy_in_host_memory_is_no_block_of_device_memory() {
    let mut fleet = fleet(&["with_host_copy"]);
    let tiers = |fleet: &Fleet| {
        [Tier::Device, Tier::Host].map(|tier| fleet.overlap(W1, tier, &TEXT, PromptOf::default()).0)
    };
    assert_eq!(tiers(&fleet), [3, 3]);
    assert_eq!(fleet.publish(&of_sglang("host_copy_alone")), []);
    assert_eq!(tiers(&fleet), [0, 3]);
}
