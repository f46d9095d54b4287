// SPDX-License-Identifier: Apache-2.0

//! The head of a cut offer on the wire, written and read, and what is refused of it.

use kvdelta_indexer::{BlockSize, EngineHash, WorkerId};
use kvdelta_protocol::{OFFER_KEY, VERSION, cut_for, remote_request_id};
use kvdelta_transfer::{BadOffer, OfferHead};
use proptest::prelude::*;
use serde_json::{Value, json};

/// That of `tests/fixtures/offer-head-v1.json`; its numbers are above 2^63.
fn head() -> OfferHead {
    OfferHead {
        version: VERSION,
        claim_id: "0f8c7a52-1".to_owned(),
        decode_worker_id: WorkerId(18_446_744_073_709_551_557),
        prefix_hash: EngineHash(u64::MAX),
        block_size: BlockSize::try_from(32).expect("not 0"),
        first_block: 64,
        group_first_blocks: vec![64, 120],
    }
}

fn head_json() -> Value {
    serde_json::to_value(head()).expect("written")
}

/// `json` with `field` set to `value`.
fn with(mut json: Value, field: &str, value: Value) -> Value {
    json[field] = value;
    json
}

#[test]
fn recorded_bytes_are_written_and_read_exactly() {
    let text = include_str!("fixtures/offer-head-v1.json").trim_end();
    assert_eq!(serde_json::to_string(&head()).expect("written"), text);
    let read: OfferHead = serde_json::from_str(text).expect("read");
    assert_eq!(read, head());
    assert_eq!(read.check(), Ok(()));
}

#[test]
fn a_whole_answer_of_a_prefill_worker_is_read() {
    let text = include_str!("fixtures/cut-offer-v1.json");
    let answer: Value = serde_json::from_str(text).expect("JSON");
    let read: OfferHead = serde_json::from_value(answer[OFFER_KEY].clone()).expect("read");
    assert_eq!(read, head());
    // What the router reads of it.
    assert_eq!(cut_for(&answer), Some("0f8c7a52-1"));
    assert_eq!(remote_request_id(&answer), Some("cmpl-7b1d0c8e-0"));
    // What an engine without kvdelta reads of it: there is nothing to load.
    assert_eq!(answer["do_remote_prefill"], json!(false));
    assert_eq!(answer["do_remote_decode"], json!(false));
    let keys: Vec<&String> = answer.as_object().expect("a map").keys().collect();
    assert_eq!(keys, ["do_remote_decode", "do_remote_prefill", OFFER_KEY]);
}

#[test]
fn unknown_fields_are_ignored() {
    let later = with(head_json(), "partial_tokens", json!({"of": [7]}));
    let read: OfferHead = serde_json::from_value(later).expect("read");
    assert_eq!(read, head());
}

#[test]
fn what_cannot_be_read_is_no_offer() {
    let fields = head_json();
    let fields = fields.as_object().expect("a map");
    for field in fields.keys() {
        let mut lost = fields.clone();
        lost.remove(field);
        let read = serde_json::from_value::<OfferHead>(Value::Object(lost));
        assert!(read.is_err(), "without {field}");
        for wrong in [json!(null), json!(-1), json!(1.5), json!({}), json!(true)] {
            let read = serde_json::from_value::<OfferHead>(with(head_json(), field, wrong.clone()));
            assert!(read.is_err(), "{field}: {wrong}");
        }
    }
    for (field, wrong) in [
        ("block_size", json!(0)),
        ("first_block", json!(4_294_967_296_u64)),
        ("group_first_blocks", json!([1, -1])),
        ("group_first_blocks", json!(["1"])),
        ("prefix_hash", json!(1.8e19)),
    ] {
        let read = serde_json::from_value::<OfferHead>(with(head_json(), field, wrong.clone()));
        assert!(read.is_err(), "{field}: {wrong}");
    }
}

#[test]
fn an_offer_that_contradicts_itself_is_refused_with_its_reason() {
    let id = || "0f8c7a52-1".to_owned();
    let cases = [
        (
            OfferHead {
                version: 2,
                ..head()
            },
            BadOffer::Version(2),
        ),
        (
            OfferHead {
                claim_id: String::new(),
                ..head()
            },
            BadOffer::NoId,
        ),
        (
            OfferHead {
                first_block: 0,
                ..head()
            },
            BadOffer::NothingSkipped(id()),
        ),
        (
            OfferHead {
                group_first_blocks: Vec::new(),
                ..head()
            },
            BadOffer::NoGroups(id()),
        ),
    ];
    for (offer, reason) in cases {
        assert!(reason.to_string().ends_with("; computing all here"));
        assert_eq!(offer.check(), Err(reason));
    }
}

proptest! {
    #[test]
    fn every_head_comes_back(
        claim_id in ".{0,40}", worker: u64, hash: u64, tokens in 1..=u32::MAX, first_block: u32,
        group_first_blocks in prop::collection::vec(any::<u32>(), 0..6),
    ) {
        let head = OfferHead {
            version: VERSION,
            claim_id,
            decode_worker_id: WorkerId(worker),
            prefix_hash: EngineHash(hash),
            block_size: BlockSize::try_from(tokens).expect("not 0"),
            first_block,
            group_first_blocks,
        };
        let text = serde_json::to_string(&head).expect("written");
        prop_assert_eq!(serde_json::from_str::<OfferHead>(&text).expect("read"), head);
    }

    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(head) = serde_json::from_slice::<OfferHead>(&bytes) {
            let _ = head.check();
        }
    }
}
