// SPDX-License-Identifier: Apache-2.0

use std::collections::HashSet;
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use kvdelta_indexer::BlockSize;
use tempfile::TempDir;

use super::read::{BadTrace, Readout};
use super::requests::Interner;
use super::{Node, Reading, Synthetic, Trace, read};

const GOOD: &str =
    r#"{"timestamp": 5, "input_length": 5, "output_length": 2, "hash_ids": [7, 8, 9]}"#;

fn size(tokens: u32) -> BlockSize {
    BlockSize::try_from(tokens).unwrap()
}

fn reading() -> Reading {
    Reading {
        block_size: Some(size(2)),
        ..Reading::default()
    }
}

fn file(folder: &TempDir, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.path().join(name);
    fs::write(&path, bytes).unwrap();
    path
}

fn read_text(text: &str, how: Reading) -> Result<Readout, BadTrace> {
    let folder = tempfile::tempdir().unwrap();
    read(&[file(&folder, "trace.jsonl", text.as_bytes())], how)
}

fn said(error: BadTrace) -> String {
    format!("{:#}", anyhow::Error::new(error))
}

/// Times in milliseconds, tokens and blocks of all requests.
fn all(trace: &Trace) -> Vec<(u128, u32, u32, Vec<u32>)> {
    let each = trace.requests().iter().map(|one| {
        let path = trace.path(one).iter().map(|node| node.0);
        let at = one.at.as_millis();
        (at, one.prompt_tokens, one.output_tokens, path.collect())
    });
    each.collect()
}

#[test]
fn bad_lines_are_named_with_their_number() {
    let event = |inner: &str| {
        format!(
            r#"{{"schema":"dynamo.request.trace.v1","event_type":"request_end","event_time_unix_ms":9{inner}}}"#
        )
    };
    let dynamo = |metrics: &str| event(&format!(r#","request":{{{metrics}}}"#));
    let hashes = r#""replay":{"trace_block_size":4,"input_length":2,"input_sequence_hashes":[1]}"#;
    let cases: &[(&str, &str)] = &[
        ("{", "EOF while parsing an object at column 1"),
        ("7", "invalid type: integer `7`"),
        (
            r#"{"timestamp": 6, "input_length": 5, "output_length": 2}"#,
            "missing field `hash_ids`",
        ),
        (
            r#"{"timestamp": 6, "input_length": -5, "output_length": 2, "hash_ids": []}"#,
            "integer `-5`",
        ),
        (
            r#"{"timestamp": 6, "input_length": 4, "output_length": 2, "hash_ids": [1, 2, 3]}"#,
            "4 tokens is 2 blocks of 2 tokens, but the line has 3 hashes; is the block size right?",
        ),
        (
            r#"{"timestamp": 6, "input_length": 0, "output_length": 2, "hash_ids": []}"#,
            "the prompt has no tokens",
        ),
        (
            r#"{"timestamp": 4.5, "input_length": 1, "output_length": 2, "hash_ids": [1]}"#,
            "time goes back from 5 ms to 4.5 ms",
        ),
        (
            r#"{"timestamp": -1, "input_length": 1, "output_length": 2, "hash_ids": [1]}"#,
            "-1 ms is no time of a request",
        ),
        (
            r#"{"timestamp": 6, "input_length": 1, "output_length": 4294967296, "hash_ids": [1]}"#,
            "4294967296 tokens are more than",
        ),
    ];
    for (line, expected) in cases {
        let text = format!("{GOOD}\n\n{line}\n");
        let error = said(read_text(&text, reading()).unwrap_err());
        assert!(error.contains("trace.jsonl: line 3: "), "{error}");
        assert!(error.contains(expected), "{line}: {error}");
    }
    let dynamo_cases: &[(String, &str)] = &[
        (event(""), "a request_end without request"),
        (
            dynamo(r#""output_tokens":1"#),
            "a request_end without request.replay",
        ),
        (
            dynamo(hashes),
            "a request_end without request.output_tokens",
        ),
        (
            dynamo(&format!(r#""output_tokens":1,{hashes}"#)),
            "the line's blocks have 4 tokens, not 2",
        ),
        (
            dynamo(&format!(r#""output_tokens":1,{hashes}"#)).replace("size\":4", "size\":0"),
            "block",
        ),
        (
            event("").replace("v1", "v2"),
            "the schema is dynamo.request.trace.v2",
        ),
        (
            r#"{"event":{"event_type":"request_end"}}"#.to_owned(),
            "not a request of the Dynamo format: missing field `schema` in `event`",
        ),
        (
            event("").replace("event_type", "kind"),
            "missing field `event_type` in the line, which has no `event`",
        ),
        (
            event("").replace("request_end", "other"),
            "event_type other is not known",
        ),
    ];
    for (line, expected) in dynamo_cases {
        let error = said(read_text(line, reading()).unwrap_err());
        assert!(error.contains("line 1: "), "{error}");
        assert!(error.contains(expected), "{line}: {error}");
    }
}

#[test]
fn bad_lines_can_be_left_out_and_are_counted() {
    let text = format!("{GOOD}\n{{\n{}\n{GOOD}\n", GOOD.replace(": 5,", ": 4,"));
    let how = Reading {
        skip_bad: true,
        ..reading()
    };
    let read = read_text(&text, how).unwrap();
    assert_eq!((read.lines, read.skipped), (4, 2));
    assert_eq!(read.trace.requests().len(), 2);
    let first = said(read.first_skipped.unwrap());
    assert!(first.contains("line 2"), "{first}");

    let error = said(read_text("{\n", how).unwrap_err());
    assert!(error.contains("no requests in "), "{error}");
}

#[test]
fn what_is_no_file_is_named() {
    let error = said(read(&["/no/such/trace".into()], reading()).unwrap_err());
    assert!(error.starts_with("cannot read /no/such/trace: "), "{error}");
    let error = said(read_text("", reading()).unwrap_err());
    assert!(error.starts_with("no requests in "), "{error}");
}

#[test]
fn only_whole_blocks_can_be_cached_and_times_count_from_the_first() {
    let later = GOOD.replace("\"timestamp\": 5", "\"timestamp\": 7.5");
    let text = format!("{GOOD}\n{}\n", later.replace("[7, 8, 9]", "[7, 5, 9]"));
    let trace = read_text(&text, reading()).unwrap().trace;
    assert_eq!(all(&trace), [(0, 5, 2, vec![0, 1]), (2, 5, 2, vec![0, 2])]);
    assert_eq!(trace.distinct_blocks(), 3);
    assert_eq!(trace.longest(), Some((3, 0)));
}

#[test]
fn packed_files_and_parts_are_one_trace() {
    let folder = tempfile::tempdir().unwrap();
    let mut packed = GzEncoder::new(Vec::new(), Compression::default());
    packed.write_all(format!("{GOOD}\n").as_bytes()).unwrap();
    // Dynamo's sink appends member after member.
    let mut members = packed.finish().unwrap();
    members.extend(members.clone());
    let parts = [
        file(&folder, "a.jsonl.gz", &members),
        file(&folder, "b.jsonl", GOOD.as_bytes()),
    ];
    let trace = read(&parts, reading()).unwrap().trace;
    assert_eq!(trace.requests().len(), 3);
    let error = said(read(&[file(&folder, "cut.gz", &members[..30])], reading()).unwrap_err());
    assert!(error.contains("line 1 cannot be read"), "{error}");
}

#[test]
fn records_of_dynamo_are_sorted_and_bring_their_block_size() {
    let record = |received: &str, hashes: &str| {
        format!(
            r#"{{"schema":"dynamo.request.trace.v1","event_type":"request_end","event_time_unix_ms":1100,
            "request":{{"request_id":"r","output_tokens":4,{received}
            "replay":{{"trace_block_size":2,"input_length":5,"input_sequence_hashes":{hashes}}}}}}}"#
        )
        .replace('\n', " ")
    };
    let lines = [
        record(r#""request_received_ms":1050,"#, "[11,22,33]"),
        r#"{"schema":"dynamo.request.trace.v1","event_type":"tool_end","event_time_unix_ms":3}"#
            .to_owned(),
        format!(
            r#"{{"event":{}}}"#,
            record(r#""total_time_ms":80.0,"#, "[11,44,55]")
        ),
    ];
    let trace = read_text(&lines.join("\n"), Reading::default())
        .unwrap()
        .trace;
    assert_eq!(trace.block_size(), size(2));
    // Numbers are those of the lines' order.
    assert_eq!(all(&trace), [(0, 5, 4, vec![0, 2]), (30, 5, 4, vec![0, 1])]);
}

#[test]
fn a_block_is_told_apart_by_what_stands_before() {
    let mut nodes = Interner::default();
    let mut path = |names: &[u64]| {
        let mut path = Vec::new();
        nodes.path(names, &mut path).unwrap();
        path
    };
    let first = path(&[1, 2, 2]);
    assert_eq!(first.iter().collect::<HashSet<_>>().len(), 3);
    assert_eq!(path(&[1, 2]), first[..2]);
    assert!(!first.contains(&path(&[2])[0]));
}

fn made(requests: usize, seed: u64) -> Trace {
    let per_second = 4.0;
    Synthetic {
        requests,
        per_second,
        block_size: size(512),
        seed,
    }
    .trace()
}

#[test]
fn a_made_trace_is_what_its_settings_say() {
    let trace = made(5000, 1);
    assert_eq!(all(&trace), all(&made(5000, 1)));
    assert_ne!(all(&trace), all(&made(5000, 2)));
    assert_eq!(trace.requests().len(), 5000);
    let times: Vec<Duration> = trace.requests().iter().map(|one| one.at).collect();
    assert!(times.is_sorted());
    let seconds = times[4999].as_secs_f64();
    assert!((900.0..2000.0).contains(&seconds), "{seconds}");
    let mut seen: HashSet<Node> = HashSet::new();
    let (mut known, mut whole) = (0, 0);
    for request in trace.requests() {
        let path = trace.path(request);
        assert_eq!(path.len(), request.prompt_tokens as usize / 512);
        let new = path.iter().position(|node| !seen.contains(node));
        known += new.unwrap_or(path.len());
        whole += path.len();
        assert!(
            path[new.unwrap_or(path.len())..]
                .iter()
                .all(|node| !seen.contains(node))
        );
        seen.extend(path);
    }
    let share = known as f64 / whole as f64;
    assert!((0.3..0.8).contains(&share), "{share} could be saved");
}
