// SPDX-License-Identifier: Apache-2.0

use super::*;
use crate::observe::snapshot;

#[test]
fn a_snapshot_as_text() {
    let expected = "\
21:40:17 UTC  3 ranks, blocks of 16 tokens; 1 not complete
device memory: 1536 blocks, 1100 distinct, 436 (28.4 %) held twice

worker    rank  trust                 device  host  disk  events/s  last event    lag  seq
decode-0     0  complete                1024     0     0      15.0       1.0 s  12 ms   41
decode-1     0  complete                 512    64     8       0.0       1.0 s  12 ms   41
decode-1     1  unknown: never heard       0     0     0       0.0           -      -    -

prompt 1: 100 tokens, 6 whole blocks
worker    rank  overlap  tokens   share  host  disk
decode-1     0        6      96  96.0 %     4     0
decode-0     0        2      32  32.0 %     0     0
decode-1     1        0       0   0.0 %     0     0

prompt 2: 0 tokens, 0 whole blocks
worker    rank  overlap  tokens  share  host  disk
decode-0     0        0       0      -     0     0
decode-1     0        0       0      -     0     0
decode-1     1        0       0      -     0     0
";
    assert_eq!(text(&snapshot::tests::snapshot()), expected);
}

#[test]
fn losses_stand_in_the_first_lines() {
    let mut snapshot = snapshot::tests::snapshot();
    snapshot.messages_lost = 7;
    snapshot.events_skipped = [("malformed", 3), ("unknown_type", 1)].into();
    let text = text(&snapshot);
    let expected = "21:40:17 UTC  3 ranks, blocks of 16 tokens; 1 not complete; 7 messages lost";
    assert_eq!(text.lines().next(), Some(expected));
    let expected = "4 events skipped (malformed, unknown type)";
    assert_eq!(text.lines().nth(1), Some(expected));
}

#[test]
fn blocks_of_another_size_have_a_line_that_says_what_to_do() {
    let mut snapshot = snapshot::tests::snapshot();
    snapshot.events_skipped = [("block_size_mismatch", 1), ("unknown_type", 2)].into();
    let text = text(&snapshot);
    let lines: Vec<&str> = text.lines().skip(1).take(2).collect();
    let expected = [
        "1 event skipped (block size mismatch): give the engine's --block-size",
        "2 events skipped (unknown type)",
    ];
    assert_eq!(lines, expected);
}

#[test]
fn names_cannot_steer_the_terminal() {
    let mut snapshot = snapshot::tests::snapshot();
    snapshot.ranks[0].worker = "\x1b[2Jx".to_owned();
    let text = text(&snapshot);
    assert!(!text.contains('\x1b'), "{text}");
    assert!(text.contains("\\u{1b}[2Jx"), "{text}");
}

#[test]
fn a_small_terminal_shows_the_beginning_and_says_what_is_cut() {
    assert_eq!(fit("a\nb\nc\n", 3, 80), "a\nb\nc\n");
    assert_eq!(
        fit("a\nb\nc\n", 2, 80),
        "a\n... 2 more lines (--json has all)\n"
    );
    assert_eq!(fit("abcd\n", 3, 2), "ab\n");
    assert_eq!(fit("a\nb\n", 0, 80), "... 2 more lines (--json has all)\n");
}

#[test]
fn durations_keep_three_digits_or_so() {
    let shown = [0.0, 0.0123, 0.9, 1.25, 59.9, 600.0, 7200.0, 90_000.0].map(duration);
    let expected = [
        "0 ms", "12 ms", "900 ms", "1.2 s", "59.9 s", "10 min", "2 h", "25 h",
    ];
    assert_eq!(shown, expected);
}
