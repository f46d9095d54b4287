// SPDX-License-Identifier: Apache-2.0

//! `kvdelta observe` on sockets of this test that play engines.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use kvdelta_indexer::{BlockSize, PromptOf, block_hashes};
use serde::{Serialize, Serializer};
use serde_json::{Value, json};
use tempfile::NamedTempFile;
use tokio::runtime::Runtime;
use tokio::time::sleep;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

/// Tokens in a block.
const SIZE: usize = 4;

/// A batch of vLLM: `[time, events, rank]`.
fn batch(time: f64, events: &[Value]) -> Vec<u8> {
    rmp_serde::to_vec(&json!([time, events, null])).unwrap()
}

/// Blocks `names`, each of four tokens of its own number.
fn stored(parent: Option<u64>, names: &[u32]) -> Value {
    let tokens: Vec<u32> = names.iter().flat_map(|name| [*name; SIZE]).collect();
    json!({
        "type": "BlockStored", "block_hashes": names, "parent_block_hash": parent,
        "token_ids": tokens, "block_size": SIZE, "lora_id": null, "medium": "GPU",
    })
}

fn removed(names: &[u32]) -> Value {
    json!({"type": "BlockRemoved", "block_hashes": names, "medium": "GPU"})
}

/// The frames of an engine's batch.
fn message(seq: usize, batch: &[u8]) -> ZmqMessage {
    let seq = u64::try_from(seq).unwrap().to_be_bytes();
    let mut message = ZmqMessage::from(Vec::new());
    message.push_back(seq.to_vec().into());
    message.push_back(batch.to_vec().into());
    message
}

/// An engine that has published its batches before anybody listened, and answers for them.
struct Engine {
    endpoint: String,
    replay: String,
}

impl Engine {
    fn start(runtime: &Runtime, batches: Vec<Vec<u8>>) -> Self {
        runtime.block_on(async {
            let mut publisher = PubSocket::new();
            let endpoint = publisher
                .bind("tcp://127.0.0.1:0")
                .await
                .unwrap()
                .to_string();
            let mut router = RouterSocket::new();
            let replay = router.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
            tokio::spawn(async move {
                let _publisher = publisher;
                loop {
                    let asked = router.recv().await.unwrap();
                    let client = asked.get(0).unwrap().clone();
                    let from = asked.get(asked.len() - 1).unwrap();
                    let from = u64::from_be_bytes(from.as_ref().try_into().unwrap());
                    let from = usize::try_from(from).unwrap();
                    let kept = batches.iter().enumerate().skip(from);
                    let answers = kept.map(|(seq, batch)| message(seq, batch));
                    let mut end = ZmqMessage::from(Vec::new());
                    end.push_back(u64::MAX.to_be_bytes().to_vec().into());
                    end.push_back(Vec::new().into());
                    for mut answer in answers.chain([end]) {
                        answer.push_front(client.clone());
                        router.send(answer).await.unwrap();
                    }
                }
            });
            Self { endpoint, replay }
        })
    }

    fn option(&self, name: &str) -> String {
        format!("{name}={},replay={}", self.endpoint, self.replay)
    }
}

/// An endpoint where nobody is.
fn nobody() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    format!("tcp://{}", listener.local_addr().unwrap())
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvdelta"));
    command.arg("observe").args(arguments);
    for variable in [
        "DYN_DISCOVERY_BACKEND",
        "DYN_FILE_KV",
        "ETCD_ENDPOINTS",
        "NATS_SERVER",
    ] {
        command.env_remove(variable);
    }
    command
}

fn observe(arguments: &[&str]) -> Output {
    command(arguments).output().unwrap()
}

fn lines(output: &Output) -> Vec<Value> {
    let text = String::from_utf8_lossy(&output.stdout);
    let lines = text.lines().map(serde_json::from_str);
    lines.collect::<Result<_, _>>().unwrap()
}

fn two_engines(runtime: &Runtime) -> [Engine; 2] {
    let first = vec![
        batch(1.0, &[stored(None, &[1, 2, 3])]),
        batch(2.0, &[stored(Some(3), &[4]), stored(None, &[9])]),
    ];
    let second = vec![
        batch(1.0, &[stored(None, &[1, 2, 8])]),
        batch(2.0, &[removed(&[8])]),
        batch(3.0, &[stored(Some(2), &[7])]),
    ];
    [first, second].map(|batches| Engine::start(runtime, batches))
}

#[test]
fn two_workers_and_a_prompt_in_one_snapshot() {
    let runtime = Runtime::new().unwrap();
    let [first, second] = two_engines(&runtime);
    let mut prompts = NamedTempFile::new().unwrap();
    // The blocks 1, 2, 3 and two tokens of a fourth.
    writeln!(prompts, "[1,1,1,1, 2,2,2,2, 3,3,3,3, 4,4]").unwrap();
    let output = observe(&[
        "--worker",
        &first.option("a"),
        "--worker",
        &second.option("b"),
        "--block-size=4",
        "--prompt-tokens",
        prompts.path().to_str().unwrap(),
        "--once",
        "--json",
        "--wait=60",
        "--interval=0.1",
    ]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let [snapshot] = &lines(&output)[..] else {
        panic!("{output:?}");
    };
    let expected = [("a", 5, 3, 1), ("b", 3, 3, 2)];
    for (rank, (worker, blocks, events, sequence)) in
        snapshot["ranks"].as_array().unwrap().iter().zip(expected)
    {
        assert_eq!(rank["worker"], worker, "{snapshot}");
        assert_eq!(rank["device_blocks"], blocks, "{snapshot}");
        assert_eq!(rank["events"], events, "{snapshot}");
        assert_eq!(rank["sequence"], sequence, "{snapshot}");
        assert_eq!(rank["trust"], "complete", "{snapshot}");
        // Its batches say that they were made in 1970.
        assert!(rank["lag_seconds"].as_f64().unwrap() > 1e9, "{snapshot}");
    }
    let device = &snapshot["device"];
    assert_eq!(device["held_blocks"], 8, "{snapshot}");
    // 1, 2, 3, 4, 9 and 7.
    assert_eq!(device["distinct_blocks"], 6, "{snapshot}");
    assert_eq!(device["repeated_blocks"], 2, "{snapshot}");
    assert_eq!(device["repeated_share"], 0.25, "{snapshot}");
    let overlaps = &snapshot["prompts"][0]["overlaps"];
    assert_eq!(
        *overlaps,
        json!([
            {
                "worker": "a", "dp_rank": 0, "device_blocks": 3, "device_tokens": 12,
                "device_share": 12.0 / 14.0, "host_blocks": 0, "disk_blocks": 0,
            },
            {
                "worker": "b", "dp_rank": 0, "device_blocks": 2, "device_tokens": 8,
                "device_share": 8.0 / 14.0, "host_blocks": 0, "disk_blocks": 0,
            },
        ])
    );
}

#[test]
fn another_salt_overlaps_with_nothing() {
    let runtime = Runtime::new().unwrap();
    let [first, _] = two_engines(&runtime);
    let mut prompts = NamedTempFile::new().unwrap();
    writeln!(prompts, "1 1 1 1 2 2 2 2").unwrap();
    let output = observe(&[
        "--worker",
        &first.option("a"),
        "--block-size=4",
        "--prompt-tokens",
        prompts.path().to_str().unwrap(),
        "--salt=tenant",
        "--once",
        "--json",
        "--wait=60",
        "--interval=0.1",
    ]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let overlap = &lines(&output)[0]["prompts"][0]["overlaps"][0];
    assert_eq!(overlap["device_blocks"], 0);
}

#[test]
fn live_events_are_followed_until_the_count_is_reached() {
    let runtime = Runtime::new().unwrap();
    let endpoint = runtime.block_on(async {
        let mut publisher = PubSocket::new();
        let endpoint = publisher
            .bind("tcp://127.0.0.1:0")
            .await
            .unwrap()
            .to_string();
        tokio::spawn(async move {
            for seq in 0_u32.. {
                let parent = (seq > 0).then(|| u64::from(seq));
                let batch = batch(1.0, &[stored(parent, &[seq + 1])]);
                let at = usize::try_from(seq).unwrap();
                publisher.send(message(at, &batch)).await.unwrap();
                sleep(TICK).await;
            }
        });
        endpoint
    });
    let worker = format!("a={endpoint}");
    let output = observe(&[
        "--worker",
        &worker,
        "--block-size=4",
        "--count=3",
        "--interval=0.2",
        "--wait=60",
        "--json",
    ]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let snapshots = lines(&output);
    assert_eq!(snapshots.len(), 3);
    let sequences: Vec<u64> = snapshots
        .iter()
        .map(|snapshot| snapshot["ranks"][0]["sequence"].as_u64().unwrap())
        .collect();
    assert!(sequences.is_sorted(), "{sequences:?}");
    for snapshot in &snapshots {
        assert!(snapshot["interval_seconds"].as_f64().unwrap() > 0.0);
        assert!(snapshot["ranks"][0]["events_per_second"].is_f64());
    }
    // The subscription began after the engine, and there is no replay; parents before it are not known.
    assert_eq!(snapshots[2]["ranks"][0]["trust"], "may_have_holes");
}

/// The envelope of Dynamo's event plane around the store of one block that begins a prompt.
fn envelope(sequence: u32, worker_id: u64) -> Vec<u8> {
    #[derive(Serialize)]
    struct Envelope {
        publisher_id: u64,
        sequence: u32,
        published_at: u64,
        topic: &'static str,
        #[serde(serialize_with = "bytes")]
        payload: Vec<u8>,
    }
    fn bytes<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(bytes)
    }
    // As the tokens `sequence` four times over.
    let tokens = [sequence; SIZE];
    let size = BlockSize::try_from(4).unwrap();
    let block = block_hashes(&tokens, size, PromptOf::default())[0];
    let block = json!({"block_hash": sequence, "tokens_hash": block.0});
    let event = json!({
        "event_id": sequence, "dp_rank": 0,
        "data": {"stored": {"parent_hash": null, "blocks": [block]}},
    });
    let events = json!([{"worker_id": worker_id, "event": event}]);
    let envelope = Envelope {
        publisher_id: PUBLISHER,
        sequence,
        published_at: 0,
        topic: "kv-events",
        payload: rmp_serde::to_vec(&events).unwrap(),
    };
    rmp_serde::to_vec_named(&envelope).unwrap()
}

const PUBLISHER: u64 = 42;
const TICK: Duration = Duration::from_millis(5);

/// A publisher of Dynamo's brokerless event plane; returns its endpoint.
fn dynamo_publisher(runtime: &Runtime, worker_id: u64) -> String {
    runtime.block_on(async {
        let mut socket = PubSocket::new();
        let endpoint = socket.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
        tokio::spawn(async move {
            for sequence in 0_u32.. {
                let envelope = envelope(sequence, worker_id);
                let mut body = vec![1];
                body.extend(u32::try_from(envelope.len()).unwrap().to_be_bytes());
                body.extend(envelope);
                let mut message = ZmqMessage::from("kv-events");
                message.push_back(PUBLISHER.to_be_bytes().to_vec().into());
                message.push_back(u64::from(sequence).to_be_bytes().to_vec().into());
                message.push_back(body.into());
                socket.send(message).await.unwrap();
                sleep(TICK).await;
            }
        });
        endpoint
    })
}

/// A broker that carries the events of one worker to all who subscribe to them; returns its address.
fn nats_broker(worker_id: u64) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("nats://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // It ends when the client is gone.
            thread::spawn(move || carry(&stream, worker_id));
        }
    });
    address
}

fn carry(mut stream: &TcpStream, worker_id: u64) -> std::io::Result<()> {
    let info = json!({
        "server_id": "a", "server_name": "a", "version": "2.10.0", "go": "", "host": "127.0.0.1",
        "port": 4222, "headers": true, "max_payload": 1 << 20, "proto": 1, "client_id": 1,
    });
    write!(stream, "INFO {info}\r\n")?;
    let mut is_subscribed = false;
    for line in BufReader::new(stream.try_clone()?).lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["PING"] => write!(stream, "PONG\r\n")?,
            [
                "SUB",
                "namespace.dynamo.component.*.endpoint.*.kv-events",
                id,
            ] => {
                assert_eq!(id, "1");
                is_subscribed = true;
            }
            _ => continue,
        }
        // The client has sent what it had to when it asks for an answer.
        if !is_subscribed || words != ["PING"] {
            continue;
        }
        for sequence in 0.. {
            let envelope = envelope(sequence, worker_id);
            let subject = "namespace.dynamo.component.backend.endpoint.generate.kv-events";
            write!(stream, "MSG {subject} 1 {}\r\n", envelope.len())?;
            stream.write_all(&envelope)?;
            write!(stream, "\r\n")?;
            thread::sleep(TICK);
        }
    }
    Ok(())
}

fn record(folder: &Path, bucket: &str, value: &Value) {
    let folder = folder.join("v1").join(bucket);
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("a"), value.to_string()).unwrap();
}

#[test]
fn discovery_tells_workers_endpoints_and_block_size() {
    let runtime = Runtime::new().unwrap();
    let worker_id = 0xabc;
    let endpoint = dynamo_publisher(&runtime, worker_id);
    let folder = tempfile::tempdir().unwrap();
    let scope = json!({"kind": "endpoint", "endpoint": {
        "namespace": "dynamo", "component": "backend", "name": "generate",
    }});
    record(
        folder.path(),
        "mdc",
        &json!({
            "type": "Model", "namespace": "dynamo", "component": "backend", "endpoint": "generate",
            "instance_id": worker_id,
            "card_json": {"display_name": "m", "kv_cache_block_size": 4},
        }),
    );
    record(
        folder.path(),
        "event_sources",
        &json!({
            "type": "EventSource", "scope": scope, "topic": "kv-events", "publisher_id": PUBLISHER,
            "metadata": {"worker": {"worker_id": worker_id, "dp_rank": 0}},
        }),
    );
    record(
        folder.path(),
        "event_channels",
        &json!({
            "type": "EventChannel", "scope": scope, "topic": "kv-events", "instance_id": PUBLISHER,
            "transport": {"kind": "Zmq", "config": {"endpoint": endpoint}},
        }),
    );
    let folder = folder.path().to_str().unwrap();
    let output = observe(&[
        "--discovery",
        folder,
        "--once",
        "--json",
        "--wait=60",
        "--interval=0.1",
    ]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let snapshot = &lines(&output)[0];
    assert_eq!(snapshot["block_size_tokens"], 4);
    heard_late(snapshot, "backend/abc");
}

#[test]
fn a_broker_is_enough_to_find_workers() {
    let address = nats_broker(0xdef);
    let output = observe(&[
        "--nats",
        &address,
        "--namespace=dynamo",
        "--block-size=4",
        "--once",
        "--json",
        "--wait=60",
        "--interval=0.1",
    ]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    heard_late(&lines(&output)[0], "def");
}

/// Only what came since is known, and nobody can be asked for what was before.
fn heard_late(snapshot: &Value, worker: &str) {
    let ranks = snapshot["ranks"].as_array().unwrap();
    assert_eq!(ranks.len(), 1, "{snapshot}");
    assert_eq!(ranks[0]["worker"], worker);
    assert_eq!(ranks[0]["trust"], "may_have_holes", "{snapshot}");
    assert_eq!(ranks[0]["reason"], "joined_late", "{snapshot}");
    assert!(
        ranks[0]["device_blocks"].as_u64().unwrap() > 0,
        "{snapshot}"
    );
}

#[test]
fn a_rank_that_is_never_heard_from_is_exit_code_1() {
    let runtime = Runtime::new().unwrap();
    let [first, _] = two_engines(&runtime);
    let nobody = format!("b={}", nobody());
    let arguments = ["--block-size=4", "--once", "--wait=1", "--interval=0.1"];
    let first = first.option("a");
    let both = [&["--worker", &first, "--worker", &nobody], &arguments[..]].concat();
    let output = observe(&both);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    // No terminal: no movement of its cursor.
    assert!(!text.contains('\x1b'), "{text}");
    assert!(text.contains("unknown: never heard"), "{text}");
}

#[test]
fn an_engine_that_says_that_it_holds_nothing_is_heard_from() {
    let runtime = Runtime::new().unwrap();
    let worker = Engine::start(&runtime, Vec::new()).option("a");
    let arguments = ["--block-size=4", "--once", "--wait=60", "--interval=0.1"];
    let output = observe(&[&["--worker", &worker], &arguments[..]].concat());
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let row = text.lines().find(|line| line.starts_with("a "));
    let columns: Option<Vec<&str>> = row.map(|row| row.split_whitespace().take(3).collect());
    assert_eq!(columns, Some(vec!["a", "0", "complete"]), "{text}");
}

#[test]
fn another_block_size_is_said_and_is_exit_code_1() {
    let runtime = Runtime::new().unwrap();
    let [first, _] = two_engines(&runtime);
    let worker = first.option("a");
    let arguments = ["--once", "--wait=60", "--interval=0.1"];
    let wrong = [&["--worker", &worker, "--block-size=8"], &arguments[..]].concat();
    let output = observe(&wrong);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let line = "3 events skipped (block size mismatch): give the engine's --block-size\n";
    assert!(text.contains(line), "{text}");
}

#[test]
fn bad_usage_is_exit_code_2_and_says_why() {
    let mut bad = NamedTempFile::new().unwrap();
    writeln!(bad, "1 2 x").unwrap();
    let bad = bad.path().to_str().unwrap();
    let empty = tempfile::tempdir().unwrap();
    let empty = empty.path().to_str().unwrap();
    let worker = "--worker=a=tcp://127.0.0.1:1";
    for (arguments, reason) in [
        (&["--worker=a"][..], "NAME=tcp://host:port"),
        (&[worker], "--block-size"),
        (&[worker, "--block-size=0"], "at least 1"),
        (
            &[worker, worker, "--block-size=4"],
            "two workers are called \"a\"",
        ),
        (
            &[worker, "--worker=b=tcp://127.0.0.1:1", "--block-size=4"],
            "\"a\" and \"b\" have the same endpoint tcp://127.0.0.1:1",
        ),
        (
            &[worker, "--block-size=4", "--prompt-tokens", bad],
            "\"x\" is no token id",
        ),
        (
            &[worker, "--block-size=4", "--prompt-tokens=/none"],
            "cannot read prompts from /none",
        ),
        (&[worker, "--block-size=4", "--salt=a"], "--prompt-tokens"),
        (&[worker, "--block-size=4", "--interval=0"], "at least 0.1"),
        (
            &[worker, "--block-size=4", "--count=0"],
            "not a number of snapshots, at least 1",
        ),
        (
            &[worker, "--block-size=4", "--once", "--count=2"],
            "cannot be used with",
        ),
        (
            &["--nats=nats://127.0.0.1:1", "--once"],
            "give --block-size",
        ),
        (
            &["--nats=nats://127.0.0.1:1", "--block-size=4", "--model=m"],
            "takes discovery",
        ),
        (&["--discovery", empty], "no worker to follow"),
        (
            &["--discovery=/none"],
            "cannot read discovery (files /none)",
        ),
    ] {
        let output = observe(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {output:?}");
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains(reason), "{arguments:?}: {error}");
    }
}

#[test]
fn where_nothing_is_given_the_error_says_what_could_be() {
    let hint = "name engines with --worker, or Dynamo's discovery with --file-kv or --etcd";
    // Nothing is at that address, or an etcd without workers: either is an error.
    let output = observe(&["--once", "--model=no-such-model"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.trim_end().ends_with(hint), "{error}");
    let output = observe(&["--discovery=/none"]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!error.contains(hint), "{error}");
}

#[test]
fn a_reader_that_is_gone_ends_it_well() {
    let runtime = Runtime::new().unwrap();
    let [first, _] = two_engines(&runtime);
    let arguments = [
        "--worker",
        &first.option("a"),
        "--block-size=4",
        "--interval=0.1",
        "--json",
    ];
    let mut child = command(&arguments).stdout(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("\"complete\"") {
        line.clear();
        assert!(output.read_line(&mut line).unwrap() > 0, "it ended");
    }
    drop(output);
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn an_interrupt_ends_it_well() {
    let runtime = Runtime::new().unwrap();
    let [first, _] = two_engines(&runtime);
    let worker = first.option("a");
    let arguments = ["--worker", &worker, "--block-size=4", "--interval=0.1"];
    let mut child = command(&arguments).stdout(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.starts_with("a ") || !line.contains("complete") {
        line.clear();
        assert!(output.read_line(&mut line).unwrap() > 0, "it ended");
    }
    let interrupt = Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status();
    assert!(interrupt.unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn help_tells_the_exit_codes() {
    let output = observe(&["--help"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("Exit codes: 0 ended well"), "{text}");
    assert!(text.contains("Examples:"), "{text}");
}
