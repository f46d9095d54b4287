// SPDX-License-Identifier: Apache-2.0

//! The bytes on the wire, written and read, and what each side does with what it does not know.

use std::fmt::Debug;

use kvdelta_indexer::{BlockSize, DpRank, EngineHash, WorkerId};
use kvdelta_protocol::{
    BadClaim, CacheGroup, Capability, DecodeCacheInfo, HELD_CLAIM_KEY, NoCapability, OFFER_KEY,
    Recovered, STALE_CLAIM_KEY, StaleReason, StaleReport, VERSION, cut_for, deserialize_known,
    held_claim, remote_request_id, stale_report,
};
use proptest::prelude::*;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

fn size(tokens: u32) -> BlockSize {
    BlockSize::try_from(tokens).expect("not 0")
}

/// That of the README and of `tests/fixtures/claim-v1.*`; its numbers are above 2^63.
fn claim() -> DecodeCacheInfo {
    DecodeCacheInfo {
        version: VERSION,
        claim_id: "0f8c7a52-1".to_owned(),
        decode_worker_id: WorkerId(18_446_744_073_709_551_557),
        decode_dp_rank: DpRank(3),
        cached_prefix_blocks: 64,
        block_size: size(32),
        prefix_hash: EngineHash(u64::MAX),
    }
}

fn capability() -> Capability {
    Capability {
        version: VERSION,
        block_size: size(32),
        prefix_caching: true,
        cache_groups: vec![
            CacheGroup::FullAttention,
            CacheGroup::MlaAttention,
            CacheGroup::SlidingWindow,
            CacheGroup::Mamba,
            CacheGroup::Unknown,
        ],
        lower_tiers: false,
    }
}

fn report() -> StaleReport {
    StaleReport {
        version: VERSION,
        claim_id: "0f8c7a52-1".to_owned(),
        said_blocks: 64,
        had_blocks: 40,
        reason: StaleReason::Stale,
        recovered: Recovered::AskAgain,
    }
}

/// What a decode worker answers.
fn answer(report: &Value) -> Value {
    json!({OFFER_KEY: {STALE_CLAIM_KEY: report}})
}

fn claim_json() -> Value {
    serde_json::to_value(claim()).expect("a claim is JSON")
}

/// `json` with `field` set to `value`.
fn with(mut json: Value, field: &str, value: Value) -> Value {
    json[field] = value;
    json
}

/// A prefill request as far as this crate is concerned.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Request {
    before: u32,
    #[serde(
        default,
        deserialize_with = "deserialize_known",
        skip_serializing_if = "Option::is_none"
    )]
    decode_cache_info: Option<DecodeCacheInfo>,
    after: String,
}

impl Request {
    fn of(claim: Option<DecodeCacheInfo>) -> Self {
        Self {
            before: 7,
            decode_cache_info: claim,
            after: "rest".to_owned(),
        }
    }
}

fn request_json(claim: &Value) -> String {
    json!({"before": 7, "decode_cache_info": claim, "after": "rest"}).to_string()
}

fn bytes_of_hex(text: &str) -> Vec<u8> {
    let digits: Vec<u32> = text
        .chars()
        .filter_map(|digit| digit.to_digit(16))
        .collect();
    digits
        .chunks(2)
        .map(|pair| u8::try_from(pair[0] * 16 + pair[1]).expect("two digits"))
        .collect()
}

#[track_caller]
fn both_ways<T: Serialize + DeserializeOwned + PartialEq + Debug>(
    value: &T,
    json: &str,
    msgpack: &str,
) {
    let json = json.trim_end();
    assert_eq!(serde_json::to_string(value).expect("written"), json);
    assert_eq!(&serde_json::from_str::<T>(json).expect("read"), value);
    let msgpack = bytes_of_hex(msgpack);
    assert_eq!(rmp_serde::to_vec_named(value).expect("written"), msgpack);
    assert_eq!(&rmp_serde::from_slice::<T>(&msgpack).expect("read"), value);
}

#[test]
fn recorded_bytes_are_written_and_read_exactly() {
    both_ways(
        &claim(),
        include_str!("fixtures/claim-v1.json"),
        include_str!("fixtures/claim-v1.msgpack.hex"),
    );
    both_ways(
        &capability(),
        include_str!("fixtures/capability-v1.json"),
        include_str!("fixtures/capability-v1.msgpack.hex"),
    );
    both_ways(
        &report(),
        include_str!("fixtures/stale-claim-v1.json"),
        include_str!("fixtures/stale-claim-v1.msgpack.hex"),
    );
}

#[test]
fn a_report_is_read_out_of_a_decode_workers_answer() {
    let written = serde_json::to_value(report()).expect("written");
    let answered = answer(&written);
    assert_eq!(stale_report(&answered), Some(report()));
    let engine_data = json!({"kv_transfer_params": answered, "token_data": [1, 2]});
    assert_eq!(stale_report(&engine_data), Some(report()));
    let cases = [
        ("stale", StaleReason::Stale),
        ("content", StaleReason::Content),
        ("expired", StaleReason::Expired),
        ("load_failed", StaleReason::LoadFailed),
    ];
    for (label, reason) in cases {
        let said = answer(&with(written.clone(), "reason", json!(label)));
        assert_eq!(stale_report(&said).expect(label).reason, reason);
        assert_eq!(reason.as_label(), label);
    }
    let cases = [
        ("recompute", Recovered::Recompute),
        ("sent", Recovered::Sent),
        ("ask_again", Recovered::AskAgain),
        ("failed", Recovered::Failed),
    ];
    for (label, recovered) in cases {
        let said = answer(&with(written.clone(), "recovered", json!(label)));
        assert_eq!(stale_report(&said).expect(label).recovered, recovered);
        assert_eq!(recovered.as_label(), label);
    }
}

#[test]
fn a_claim_that_held_is_read_out_of_a_prefill_workers_answer() {
    let answered = json!({OFFER_KEY: {HELD_CLAIM_KEY: "0f8c7a52-1"}, "kv_cache_hit": {}});
    assert_eq!(held_claim(&answered), Some("0f8c7a52-1"));
    assert_eq!(stale_report(&answered), None);
    for nothing in [
        Value::Null,
        json!({HELD_CLAIM_KEY: "0f8c7a52-1"}),
        json!({OFFER_KEY: {HELD_CLAIM_KEY: 7}}),
        answer(&serde_json::to_value(report()).expect("written")),
    ] {
        assert_eq!(held_claim(&nothing), None, "{nothing}");
    }
}

#[test]
fn what_is_no_report_is_none() {
    let good = serde_json::to_value(report()).expect("written");
    let mut lost = good.clone();
    lost.as_object_mut().expect("a map").remove("recovered");
    let reports = [
        Value::Null,
        json!(true),
        json!([1, "x", 1, 1, "stale"]),
        json!({}),
        lost,
        with(good.clone(), "version", json!(2)),
        with(good.clone(), "claim_id", json!(7)),
        with(good.clone(), "said_blocks", json!(-1)),
        with(good.clone(), "said_blocks", json!(4_294_967_296_u64)),
        with(good.clone(), "had_blocks", json!(1.5)),
        with(good.clone(), "reason", json!(3)),
        with(good, "recovered", Value::Null),
    ];
    for report in reports {
        assert_eq!(stale_report(&answer(&report)), None, "{report}");
    }
    for nothing in [
        Value::Null,
        json!("kvdelta"),
        json!([]),
        json!({"kv_transfer_params": null}),
        json!({"kvdelta": null}),
        json!({"kvdelta": {"claim_id": "c-1"}}),
    ] {
        assert_eq!(stale_report(&nothing), None, "{nothing}");
    }
}

#[test]
fn a_cut_offer_names_the_request_that_is_to_be_released() {
    let inner = json!({"remote_request_id": "cmpl-1", "remote_block_ids": [[7]]});
    let cut = json!({"do_remote_prefill": false, "kvdelta": {"claim_id": "c-1", "params": inner}});
    assert_eq!(remote_request_id(&cut), Some("cmpl-1"));
    assert_eq!(
        remote_request_id(&json!({"kv_transfer_params": cut})),
        Some("cmpl-1")
    );
    // A whole offer is nobody's in particular.
    assert_eq!(remote_request_id(&inner), None);
    for id in [Value::Null, json!(""), json!(7), json!(["cmpl-1"])] {
        let offer = json!({"kvdelta": {"params": {"remote_request_id": id}}});
        assert_eq!(remote_request_id(&offer), None, "{id}");
    }
    for params in [Value::Null, json!([]), json!({})] {
        let offer = json!({"kvdelta": {"params": params}});
        assert_eq!(remote_request_id(&offer), None, "{params}");
    }
}

#[test]
fn what_a_vllm_worker_advertises_is_read() {
    let text = include_str!("fixtures/capability-vllm.json");
    let read: Capability = serde_json::from_str(text).expect("read");
    assert_eq!(
        read,
        Capability {
            version: 1,
            block_size: size(32),
            prefix_caching: true,
            cache_groups: vec![CacheGroup::FullAttention],
            lower_tiers: false,
        }
    );
    assert_eq!(read.check(size(32)), Ok(()));
}

#[test]
fn a_worker_on_which_no_claims_hold_can_still_tell_of_lower_tiers() {
    let said = json!({
        "version": 0, "block_size": 32, "prefix_caching": true, "cache_groups": ["full_attention"],
        "lower_tiers": true,
    });
    let read: Capability = serde_json::from_value(said.clone()).expect("read");
    assert!(read.lower_tiers);
    assert_eq!(read.check(size(32)), Err(NoCapability::Version(0)));
    assert_eq!(serde_json::to_value(read).expect("written"), said);
}

#[test]
fn a_request_without_a_claim_has_no_field() {
    let text = serde_json::to_string(&Request::of(None)).expect("written");
    assert_eq!(text, r#"{"before":7,"after":"rest"}"#);
    let read: Request = serde_json::from_str(&text).expect("read");
    assert_eq!(read, Request::of(None));
}

#[test]
fn unknown_fields_are_ignored() {
    let later = with(claim_json(), "cached_tiers", json!({"host": [1, 2]}));
    let read: DecodeCacheInfo = serde_json::from_value(later.clone()).expect("read");
    assert_eq!(read, claim());
    let request: Request = serde_json::from_str(&request_json(&later)).expect("read");
    assert_eq!(request, Request::of(Some(claim())));
}

#[test]
fn a_claim_that_cannot_be_read_is_none_and_the_request_goes_on() {
    let good = claim_json();
    let mut bad = vec![
        Value::Null,
        json!({}),
        json!([]),
        json!([1, "x"]),
        json!("claim"),
        json!(true),
        json!(-1.5),
        json!(u64::MAX),
        with(good.clone(), "version", json!(0)),
        with(good.clone(), "version", json!(2)),
        with(good.clone(), "version", json!("1")),
        with(good.clone(), "claim_id", json!(5)),
        with(good.clone(), "block_size", json!(0)),
    ];
    let fields: Vec<String> = good.as_object().expect("a map").keys().cloned().collect();
    assert_eq!(fields.len(), 7);
    for field in &fields {
        let mut missing = good.clone();
        missing.as_object_mut().expect("a map").remove(field);
        bad.push(missing);
        for value in [Value::Null, json!([]), json!({}), json!(-1), json!(1.5)] {
            bad.push(with(good.clone(), field, value));
        }
    }
    for field in ["decode_dp_rank", "cached_prefix_blocks", "block_size"] {
        bad.push(with(good.clone(), field, json!(u64::from(u32::MAX) + 1)));
    }
    for claim in bad {
        let text = request_json(&claim);
        let read: Request = serde_json::from_str(&text).expect(&text);
        assert_eq!(read, Request::of(None), "{text}");
        let read: Request =
            serde_json::from_value(serde_json::from_str(&text).expect("JSON")).expect(&text);
        assert_eq!(read, Request::of(None), "{text}");
        let packed = rmp_serde::to_vec_named(
            &json!({"before": 7, "decode_cache_info": claim, "after": "rest"}),
        );
        let read: Request = rmp_serde::from_slice(&packed.expect("packed")).expect(&text);
        assert_eq!(read, Request::of(None), "{text}");
    }
}

#[test]
fn numbers_that_json_has_and_u64_has_not_are_no_claim() {
    for number in [
        "18446744073709551616",
        "-9223372036854775809",
        "1e19",
        "1e308",
    ] {
        let text = claim_json()
            .to_string()
            .replace("18446744073709551615", number);
        assert!(text.contains(number));
        let request = format!(r#"{{"before":7,"decode_cache_info":{text},"after":"rest"}}"#);
        let read: Request = serde_json::from_str(&request).expect("read");
        assert_eq!(read, Request::of(None), "{number}");
    }
}

#[test]
fn a_field_said_twice_is_no_claim() {
    let text = claim_json().to_string();
    let twice = text.replacen('{', r#"{"cached_prefix_blocks":1,"#, 1);
    let request = format!(r#"{{"before":7,"decode_cache_info":{twice},"after":"rest"}}"#);
    let read: Request = serde_json::from_str(&request).expect("read");
    assert_eq!(read, Request::of(None));
}

#[test]
fn msgpack_that_json_has_not_is_no_claim() {
    // Bytes, an extension and a map whose keys are no texts.
    for value in ["c403010203", "d40701", "820102c0c3"] {
        let mut packed = bytes_of_hex("83a66265666f726507b16465636f64655f63616368655f696e666f");
        packed.extend(bytes_of_hex(value));
        packed.extend(bytes_of_hex("a56166746572a472657374"));
        let read: Request = rmp_serde::from_slice(&packed).expect(value);
        assert_eq!(read, Request::of(None), "{value}");
    }
}

#[test]
fn a_claim_is_checked_against_its_prompt() {
    let ok = claim();
    assert_eq!(ok.cached_prefix_tokens(), 2048);
    assert_eq!(ok.check(2049), Ok(()));
    let reasons: [(DecodeCacheInfo, usize, BadClaim); 5] = [
        (
            DecodeCacheInfo {
                version: 2,
                ..claim()
            },
            4096,
            BadClaim::Version(2),
        ),
        (
            DecodeCacheInfo {
                claim_id: String::new(),
                ..claim()
            },
            4096,
            BadClaim::NoId,
        ),
        (
            DecodeCacheInfo {
                cached_prefix_blocks: 0,
                ..claim()
            },
            4096,
            BadClaim::NoBlocks(claim().claim_id),
        ),
        // The last token is computed always.
        (
            claim(),
            2048,
            BadClaim::TooManyBlocks {
                claim_id: claim().claim_id,
                claimed_blocks: 64,
                most_blocks: 63,
                prompt_tokens: 2048,
            },
        ),
        (
            DecodeCacheInfo {
                cached_prefix_blocks: u32::MAX,
                block_size: size(u32::MAX),
                ..claim()
            },
            0,
            BadClaim::TooManyBlocks {
                claim_id: claim().claim_id,
                claimed_blocks: u32::MAX,
                most_blocks: 0,
                prompt_tokens: 0,
            },
        ),
    ];
    for (bad, prompt_tokens, reason) in reasons {
        assert_eq!(bad.check(prompt_tokens), Err(reason));
    }
}

/// The table in the README, row by row.
mod old_and_new {
    use super::*;

    fn advertised(value: Value) -> Result<(), NoCapability> {
        let capability: Result<Capability, _> = serde_json::from_value(value);
        capability
            .map_err(|_| NoCapability::NotAdvertised)?
            .check(size(32))
    }

    fn capability_json() -> Value {
        json!({"version": 1, "block_size": 32, "prefix_caching": true, "cache_groups": ["full_attention"]})
    }

    #[test]
    fn an_old_worker_with_a_new_claim() {
        let newer = with(claim_json(), "version", json!(2));
        let read: Request = serde_json::from_str(&request_json(&newer)).expect("read");
        assert_eq!(read, Request::of(None));
        // Even where it has lost a field.
        let lost = json!({"version": 2, "claim_id": "x", "cached_prefix_tokens": 64});
        let read: Request = serde_json::from_str(&request_json(&lost)).expect("read");
        assert_eq!(read, Request::of(None));
    }

    #[test]
    fn a_new_worker_with_an_old_claim() {
        assert_eq!(
            advertised(with(capability_json(), "version", json!(2))),
            Ok(())
        );
    }

    #[test]
    fn a_worker_that_does_not_know_claims() {
        for nothing in [Value::Null, json!(true), json!("1"), json!([]), json!({})] {
            assert_eq!(advertised(nothing), Err(NoCapability::NotAdvertised));
        }
        let older = with(capability_json(), "version", json!(0));
        assert_eq!(advertised(older), Err(NoCapability::Version(0)));
    }

    #[test]
    fn a_later_worker_says_more() {
        let more = with(capability_json(), "partial_blocks", json!({"yes": [true]}));
        assert_eq!(advertised(more), Ok(()));
    }

    #[test]
    fn a_cache_group_unknown_here() {
        for group in [
            json!("chunked_local_attention"),
            json!({"kind": "full_attention", "window": 128}),
            json!(null),
            json!(3),
            json!(["full_attention"]),
        ] {
            let groups = json!(["full_attention", group]);
            assert_eq!(
                advertised(with(capability_json(), "cache_groups", groups)),
                Err(NoCapability::CacheGroup(CacheGroup::Unknown))
            );
        }
    }

    #[test]
    fn a_worker_whose_cache_is_not_claimed() {
        let with = |field: &str, value: Value| advertised(with(capability_json(), field, value));
        assert_eq!(
            with("prefix_caching", json!(false)),
            Err(NoCapability::PrefixCachingOff)
        );
        assert_eq!(
            with("block_size", json!(16)),
            Err(NoCapability::BlockSize {
                worker_tokens: 16,
                router_tokens: 32
            })
        );
        assert_eq!(
            with("block_size", json!(0)),
            Err(NoCapability::NotAdvertised)
        );
        assert_eq!(
            with("cache_groups", json!([])),
            Err(NoCapability::NoCacheGroups)
        );
        assert_eq!(
            with("cache_groups", json!(["mla_attention", "sliding_window"])),
            Err(NoCapability::CacheGroup(CacheGroup::SlidingWindow))
        );
        assert_eq!(with("cache_groups", json!(["mla_attention"])), Ok(()));
    }

    #[test]
    fn a_report_with_words_unknown_here() {
        let written = serde_json::to_value(report()).expect("written");
        let later = with(
            with(written.clone(), "reason", json!("moved")),
            "recovered",
            json!("migrated"),
        );
        let expected = StaleReport {
            reason: StaleReason::Unknown,
            recovered: Recovered::Unknown,
            ..report()
        };
        assert_eq!(stale_report(&answer(&later)), Some(expected));
        let more = with(written, "decode_worker_id", json!({"of": [42]}));
        assert_eq!(stale_report(&answer(&more)), Some(report()));
    }

    #[test]
    fn an_offer_of_ours_names_its_claim_or_an_empty_one() {
        let stock = json!({"remote_block_ids": [[1, 2]], "do_remote_prefill": true});
        assert_eq!(cut_for(&stock), None);
        assert_eq!(cut_for(&with(stock.clone(), "kvdelta", Value::Null)), None);
        let cut = with(stock, "kvdelta", json!({"claim_id": "c-1", "first": 64}));
        assert_eq!(cut_for(&cut), Some("c-1"));
        assert_eq!(cut_for(&json!({"kv_transfer_params": cut})), Some("c-1"));
        for no_claim in [json!({}), json!({"claim_id": 7}), json!(true), json!([])] {
            assert_eq!(cut_for(&json!({"kvdelta": no_claim})), Some(""));
        }
        for nothing in [
            Value::Null,
            json!("kvdelta"),
            json!([]),
            json!({"kv_transfer_params": null}),
        ] {
            assert_eq!(cut_for(&nothing), None);
        }
    }
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
    ];
    let key = prop_oneof![
        "[a-z_]{0,6}",
        proptest::sample::select(vec![
            "version",
            "claim_id",
            "decode_worker_id",
            "decode_dp_rank",
            "cached_prefix_blocks",
            "block_size",
            "prefix_hash",
            "prefix_caching",
            "cache_groups",
            "kvdelta",
            "kv_transfer_params",
            "stale_claim",
            "held_claim",
            "params",
            "remote_request_id",
        ])
        .prop_map(str::to_owned),
    ];
    leaf.prop_recursive(4, 48, 8, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::hash_map(key.clone(), inner, 0..9)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

prop_compose! {
    fn any_claim()(
        claim_id in ".{0,40}", worker: u64, rank: u32, blocks: u32, tokens in 1..=u32::MAX, hash: u64,
    ) -> DecodeCacheInfo {
        DecodeCacheInfo {
            version: VERSION,
            claim_id,
            decode_worker_id: WorkerId(worker),
            decode_dp_rank: DpRank(rank),
            cached_prefix_blocks: blocks,
            block_size: size(tokens),
            prefix_hash: EngineHash(hash),
        }
    }
}

proptest! {
    #[test]
    fn every_claim_comes_back(claim in any_claim()) {
        let request = Request::of(Some(claim));
        let text = serde_json::to_string(&request).expect("written");
        prop_assert_eq!(&serde_json::from_str::<Request>(&text).expect("read"), &request);
        let value = serde_json::to_value(&request).expect("written");
        prop_assert_eq!(&serde_json::from_value::<Request>(value).expect("read"), &request);
        let packed = rmp_serde::to_vec_named(&request).expect("written");
        prop_assert_eq!(&rmp_serde::from_slice::<Request>(&packed).expect("read"), &request);
    }

    #[test]
    fn a_good_claim_skips_less_than_the_prompt(claim in any_claim(), prompt_tokens: u32) {
        let prompt_tokens = usize::try_from(prompt_tokens).expect("64 bits");
        if claim.check(prompt_tokens).is_ok() {
            prop_assert!((1..prompt_tokens).contains(&claim.cached_prefix_tokens()));
        }
    }

    #[test]
    fn no_json_value_costs_the_request(value in any_json()) {
        let text = request_json(&value);
        let read: Request = serde_json::from_str(&text).expect("read");
        prop_assert_eq!((read.before, read.after.as_str()), (7, "rest"));
        let packed = rmp_serde::to_vec_named(&serde_json::from_str::<Value>(&text).expect("JSON"));
        let read: Request = rmp_serde::from_slice(&packed.expect("packed")).expect("read");
        prop_assert_eq!((read.before, read.after.as_str()), (7, "rest"));
    }

    #[test]
    fn no_bytes_and_no_value_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), value in any_json()) {
        let _ = serde_json::from_slice::<DecodeCacheInfo>(&bytes);
        let _ = rmp_serde::from_slice::<DecodeCacheInfo>(&bytes);
        let _ = rmp_serde::from_slice::<Request>(&bytes);
        let _ = rmp_serde::from_slice::<Capability>(&bytes);
        let _ = (cut_for(&value), stale_report(&value), held_claim(&value), remote_request_id(&value));
        if let Ok(capability) = serde_json::from_value::<Capability>(value) {
            let _ = capability.check(size(16));
        }
    }
}
