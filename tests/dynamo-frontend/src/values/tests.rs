// SPDX-License-Identifier: Apache-2.0

use super::*;

const NOT_A_NUMBER: [&str; 9] = ["", " ", "1,5", "lots", "NaN", "inf", "-inf", "-1", "0x10"];

#[test]
fn bad_numbers_are_refused_by_every_reader() {
    for text in NOT_A_NUMBER {
        assert!(non_negative(text).is_err(), "non_negative {text:?}");
        assert!(fraction(text).is_err(), "fraction {text:?}");
        assert!(seconds(text).is_err(), "seconds {text:?}");
        assert!(whole::<u32>(text, 0, u32::MAX).is_err(), "whole {text:?}");
    }
}

#[test]
fn good_numbers_are_read() {
    assert_eq!(non_negative("1.5"), Ok(1.5));
    assert_eq!(non_negative("0"), Ok(0.0));
    assert_eq!(non_negative("1e3"), Ok(1000.0));
    assert_eq!(fraction("1"), Ok(1.0));
    assert_eq!(seconds("120.0"), Ok(120.0));
    assert_eq!(whole::<u16>("8000", 0, u16::MAX), Ok(8000));
}

#[test]
fn ranges_hold_at_their_ends() {
    assert!(fraction("1.0000001").is_err());
    assert!(seconds("1e300").is_err());
    assert!(whole::<u16>("65536", 0, u16::MAX).is_err());
    assert!(whole::<u32>("0", 1, u32::MAX).is_err());
    assert!(whole::<u32>("4.0", 1, u32::MAX).is_err());
}

#[test]
fn none_and_empty_mean_not_set_where_dynamo_says_so() {
    for text in ["", "None"] {
        assert_eq!(nullable(text, fraction), Ok(Nullable(None)));
    }
    assert_eq!(nullable("0.5", fraction), Ok(Nullable(Some(0.5))));
    assert!(nullable("none at all", fraction).is_err());
    assert!(nullable("-0.5", fraction).is_err());
}

#[test]
fn switches_take_dynamos_words_and_no_others() {
    for text in ["1", "true", "ON", " yes "] {
        assert_eq!(switch(text), Ok(true), "{text:?}");
    }
    for text in ["", "0", "False", "off", "no"] {
        assert_eq!(switch(text), Ok(false), "{text:?}");
    }
    for text in ["maybe", "2", "y", "enabled"] {
        assert!(switch(text).is_err(), "{text:?}");
    }
}

#[test]
fn conditional_disagg_starts_from_dynamos_defaults() {
    let read = conditional_disagg(r#"{"policy": "isl_or_load", "prefill_busy_threshold": 0.5}"#);
    assert_eq!(
        read,
        Ok(ConditionalDisagg {
            policy: ConditionalDisaggPolicyKind::IslOrLoad,
            prefill_busy_threshold: Some(0.5),
            ..ConditionalDisagg::default()
        })
    );
    assert_eq!(conditional_disagg("{}"), Ok(ConditionalDisagg::default()));
}

#[test]
fn conditional_disagg_refuses_what_dynamo_refuses() {
    for text in [
        "",
        "[]",
        "isl_bounding",
        r#"{"policy": "fastest"}"#,
        r#"{"policy": null}"#,
        r#"{"eff_isl_treshold": 1}"#,
        r#"{"eff_isl_threshold": 1.5}"#,
        r#"{"eff_isl_threshold": -1}"#,
        r#"{"eff_isl_threshold": true}"#,
        r#"{"eff_isl_ratio_threshold": 1.5}"#,
        r#"{"eff_isl_ratio_threshold": NaN}"#,
        r#"{"prefill_busy_threshold": -0.1}"#,
        r#"{"decode_busy_threshold": "0.1"}"#,
        r#"{"decode_busy_threshold": 1e999}"#,
    ] {
        assert!(conditional_disagg(text).is_err(), "{text}");
    }
}
