// SPDX-License-Identifier: Apache-2.0

use super::*;

#[test]
fn pythons_own_options_are_refused_by_name() {
    for name in [
        "-i",
        "--interactive",
        "--no-interactive",
        "--dump-config-to",
        "--dyn-chat-processor",
        "--ais-system",
        "--aic-backend",
    ] {
        let line = refusal(name).expect(name);
        assert!(line.starts_with(name), "{line}");
        assert!(line.contains("Dynamo's Python frontend"), "{line}");
    }
}

#[test]
fn other_unknown_names_are_not_claimed_to_be_dynamos() {
    for name in ["--bogus", "--http-port", "bogus", "--no-such-thing"] {
        assert_eq!(refusal(name), None);
    }
}

#[test]
fn variables_warn_only_when_they_ask_for_something() {
    let warned = |name: &'static str, value: &'static str| {
        warnings(move |asked| (asked == name).then(|| value.into())).len()
    };
    assert_eq!(warned("DYN_INTERACTIVE", "1"), 1);
    assert_eq!(warned("DYN_INTERACTIVE", "false"), 0);
    assert_eq!(warned("DYN_INTERACTIVE", ""), 0);
    assert_eq!(warned("DYN_CHAT_PROCESSOR", "vllm"), 1);
    assert_eq!(warned("DYN_CHAT_PROCESSOR", "dynamo"), 0);
    assert_eq!(warned("DYN_DUMP_CONFIG_TO", "/tmp/x"), 1);
    assert_eq!(warned("DYN_FRONTEND_JEMALLOC", "1"), 1);
    assert_eq!(warned("DYN_FRONTEND_JEMALLOC", "0"), 0);
    assert_eq!(warnings(|_| None).len(), 0);
}
