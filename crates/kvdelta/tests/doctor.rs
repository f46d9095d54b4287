// SPDX-License-Identifier: Apache-2.0

//! `kvdelta doctor` on recordings of real deployments.
//!
//! A server of this test stands in for frontend, workers and etcd, and answers what was recorded
//! (`fixtures/doctor/README.md`).

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Answers by path; several are given one after the other, the last for ever.
type Answers = HashMap<String, Vec<String>>;

/// A server that lives as long as the test process.
fn serve(answers: impl FnOnce(&str) -> Answers) -> String {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let base = format!("http://{}", listener.local_addr().unwrap());
    let answers = Arc::new(Mutex::new(answers(&base)));
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let answers = answers.clone();
            thread::spawn(move || answer(stream, &answers));
        }
    });
    base
}

/// Answers one request; the key is the path, for a POST followed by the body.
fn answer(stream: TcpStream, answers: &Mutex<Answers>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    let mut request = String::new();
    reader.read_line(&mut request)?;
    let (mut length, mut line) = (0, String::new());
    while reader.read_line(&mut line)? > 2 {
        let lower = line.to_lowercase();
        if let Some(value) = lower.strip_prefix("content-length:") {
            length = value.trim().parse().unwrap_or(0);
        }
        line.clear();
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let path = request.split(' ').nth(1).unwrap_or_default();
    let key = format!("{path}{}", String::from_utf8_lossy(&body));
    let text = answers.lock().unwrap().get_mut(&key).map(|texts| {
        if texts.len() > 1 {
            texts.remove(0)
        } else {
            texts[0].clone()
        }
    });
    let (status, text) = text.map_or(("404 Not Found", String::new()), |text| ("200 OK", text));
    write!(
        reader.get_mut(),
        "HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{text}",
        text.len()
    )
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/doctor")
}

/// A recorded deployment, served again.
struct Recorded {
    discovery: TempDir,
    base: String,
}

impl Recorded {
    fn new(name: &str) -> Self {
        let folder = fixtures().join(name);
        let base = serve(|_| {
            let mut answers = Answers::new();
            for server in ["frontend", "worker-0", "worker-1", "worker-2"] {
                let texts: Vec<String> = ["a", "b"]
                    .iter()
                    .filter_map(|time| {
                        fs::read_to_string(folder.join(format!("{server}-{time}.txt"))).ok()
                    })
                    .collect();
                if !texts.is_empty() {
                    answers.insert(format!("/{server}/metrics"), texts);
                }
            }
            answers
        });
        let discovery = tempfile::tempdir().unwrap();
        copy(&folder.join("discovery"), discovery.path(), &base);
        Self { discovery, base }
    }

    fn frontend(&self) -> String {
        format!("{}/frontend/metrics", self.base)
    }

    fn command(&self, arguments: &[&str]) -> Output {
        let folder = self.discovery.path().to_str().unwrap();
        let frontend = self.frontend();
        doctor(&[&["--file-kv", folder, "--frontend", &frontend], arguments].concat())
    }

    /// The exit code, and the codes of the findings with their severity.
    fn findings(&self, arguments: &[&str]) -> (i32, Vec<(String, String)>) {
        let output = self.command(&[arguments, &["--json"]].concat());
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let code = output.status.code().unwrap();
        assert_eq!(report["exit_code"], code);
        (code, codes(&report))
    }
}

/// Copies records; system ports become paths of the server that stands in for the workers.
fn copy(from: &Path, to: &Path, base: &str) {
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            fs::create_dir_all(&target).unwrap();
            copy(&path, &target, base);
        } else {
            let mut text = fs::read_to_string(&path).unwrap();
            for worker in 0..3 {
                let port = format!("http://192.0.2.2:1808{worker}");
                text = text.replace(&port, &format!("{base}/worker-{worker}"));
            }
            fs::write(target, text).unwrap();
        }
    }
}

fn doctor(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvdelta"));
    for name in [
        "DYN_DISCOVERY_BACKEND",
        "DYN_FILE_KV",
        "ETCD_ENDPOINTS",
        "ETCD_AUTH_USERNAME",
        "ETCD_AUTH_PASSWORD",
    ] {
        command.env_remove(name);
    }
    command.arg("doctor").args(arguments).output().unwrap()
}

/// The text without its line breaks.
fn words(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout);
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn codes(report: &Value) -> Vec<(String, String)> {
    let findings = report["findings"].as_array().unwrap();
    findings
        .iter()
        .map(|finding| {
            let text = |key: &str| finding[key].as_str().unwrap().to_owned();
            (text("severity"), text("code"))
        })
        .collect()
}

fn expected(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs
        .iter()
        .map(|(severity, code)| ((*severity).to_owned(), (*code).to_owned()))
        .collect()
}

const TAKEN: (&str, &str) = ("note", "decode-events-taken");
/// The recorded workers have connectors that settle none.
const NO_CLAIMS: (&str, &str) = ("note", "no-claims");

#[test]
fn recorded_weight_1_is_healthy() {
    let recorded = Recorded::new("weight-1");
    assert_eq!(recorded.findings(&[]), (0, expected(&[NO_CLAIMS, TAKEN])));
    let watching = Recorded::new("weight-1");
    assert_eq!(
        watching.findings(&["--watch", "1"]),
        (0, expected(&[NO_CLAIMS, TAKEN]))
    );
}

#[test]
fn recorded_frontends_without_weight_or_patch_are_a_problem() {
    for name in ["weight-0", "unpatched"] {
        let problem = expected(&[("problem", "decode-events-not-taken"), NO_CLAIMS]);
        assert_eq!(Recorded::new(name).findings(&[]), (1, problem), "{name}");
    }
}

#[test]
fn recorded_round_robin_is_a_problem() {
    let recorded = Recorded::new("round-robin");
    let (code, findings) = recorded.findings(&[]);
    assert_eq!(code, 1);
    assert_eq!(
        findings,
        expected(&[
            ("problem", "one-decode-worker"),
            ("problem", "frontend-not-kv"),
            NO_CLAIMS
        ])
    );
}

#[test]
fn recorded_blocks_of_two_sizes_are_a_problem() {
    let recorded = Recorded::new("block-size");
    let (code, findings) = recorded.findings(&["--watch", "1"]);
    assert_eq!(code, 1);
    assert_eq!(
        findings,
        expected(&[("problem", "block-size-of-decode"), NO_CLAIMS, TAKEN])
    );
}

#[test]
fn recorded_events_off_are_found_on_both_sides() {
    let recorded = Recorded::new("decode-events-off");
    let (code, findings) = recorded.findings(&["--watch", "1"]);
    assert_eq!(code, 1);
    assert_eq!(
        findings,
        expected(&[
            ("problem", "decode-events-off"),
            ("problem", "events-not-received"),
            NO_CLAIMS
        ])
    );
}

#[test]
fn recorded_prefix_caching_off_is_found_with_the_events_that_it_ends() {
    let recorded = Recorded::new("prefix-caching-off");
    let (code, findings) = recorded.findings(&[]);
    assert_eq!(code, 1);
    for problem in ["prefix-caching-off", "decode-events-off"] {
        let wanted = ("problem".to_owned(), problem.to_owned());
        assert!(findings.contains(&wanted), "{findings:?}");
    }
}

#[test]
fn the_text_names_worker_place_and_setting() {
    let recorded = Recorded::new("decode-events-off");
    let output = recorded.command(&[]);
    let text = words(&output);
    for part in [
        "PROBLEM decode-events-off",
        "decode worker dynamo/backend/c9d7771312bd45a8",
        "kv_event_publishing_enabled",
        "--kv-events-config",
        "pool dynamo/kvdelta-test: 1 prefill, 2 decode; blocks of 32 tokens",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
}

#[test]
fn a_stopped_frontend_is_unknown_and_not_healthy() {
    let recorded = Recorded::new("weight-1");
    let port = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let url = format!("http://{}", port.local_addr().unwrap());
    drop(port);
    let folder = recorded.discovery.path().to_str().unwrap();
    let output = doctor(&["--file-kv", folder, "--frontend", &url, "--json"]);
    assert_eq!(output.status.code(), Some(2));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        codes(&report),
        expected(&[("unknown", "frontend-unreadable"), NO_CLAIMS])
    );
    let seen = report["findings"][0]["seen"].as_str().unwrap();
    assert!(seen.contains("Connection refused"), "{seen}");
}

#[test]
fn an_unreachable_worker_is_unknown() {
    let recorded = Recorded::new("weight-1");
    let card = recorded
        .discovery
        .path()
        .join("v1/mdc/dynamo%2Fbackend%2Fgenerate%2F49556db2ea0565f4");
    let text = fs::read_to_string(&card).unwrap();
    fs::write(&card, text.replace("/worker-1/", "/nobody/")).unwrap();
    let (code, findings) = recorded.findings(&[]);
    assert_eq!(code, 2);
    assert_eq!(
        findings,
        expected(&[("unknown", "worker-unreadable"), NO_CLAIMS, TAKEN])
    );
    // The address by option does as well as that of discovery.
    let address = format!("{}/worker-1/metrics", recorded.base);
    let (code, findings) = recorded.findings(&["--metrics", &address]);
    assert_eq!((code, findings), (0, expected(&[NO_CLAIMS, TAKEN])));
}

#[test]
fn broken_and_unknown_records_are_told_apart() {
    let recorded = Recorded::new("weight-1");
    let cards = recorded.discovery.path().join("v1/mdc");
    fs::write(cards.join("broken"), "{\"type\":\"Model\",").unwrap();
    fs::write(cards.join(".tmp_1"), "half").unwrap();
    fs::write(cards.join("future"), "{\"type\":\"Tomorrow\",\"a\":1}").unwrap();
    let card = cards.join("dynamo%2Fbackend%2Fgenerate%2F49556db2ea0565f4");
    let mut value: Value = serde_json::from_slice(&fs::read(&card).unwrap()).unwrap();
    value["card_json"]["from_the_future"] = json!({"a": 1});
    value["card_json"]["runtime_config"]["also"] = json!([1]);
    fs::write(&card, value.to_string()).unwrap();
    let (code, findings) = recorded.findings(&[]);
    assert_eq!(code, 0);
    assert_eq!(
        findings,
        expected(&[("warning", "entry-broken"), NO_CLAIMS, TAKEN])
    );
}

#[test]
fn old_records_are_of_workers_that_are_gone() {
    let recorded = Recorded::new("weight-1");
    let card = recorded
        .discovery
        .path()
        .join("v1/mdc/dynamo%2Fbackend%2Fgenerate%2F49556db2ea0565f4");
    let minute_ago = std::time::SystemTime::now() - Duration::from_secs(60);
    fs::File::options()
        .append(true)
        .open(&card)
        .unwrap()
        .set_modified(minute_ago)
        .unwrap();
    let (code, findings) = recorded.findings(&[]);
    assert_eq!(code, 1);
    assert_eq!(
        findings,
        expected(&[
            ("problem", "one-decode-worker"),
            ("warning", "entry-stale"),
            NO_CLAIMS,
            TAKEN
        ])
    );
}

#[test]
fn an_empty_folder_and_none_are_not_healthy() {
    let recorded = Recorded::new("weight-1");
    let empty = tempfile::tempdir().unwrap();
    let frontend = recorded.frontend();
    for (folder, code) in [
        (empty.path().to_owned(), "no-model"),
        (empty.path().join("none"), "discovery-unreadable"),
    ] {
        let folder = folder.to_str().unwrap();
        let output = doctor(&["--file-kv", folder, "--frontend", &frontend, "--json"]);
        assert_eq!(output.status.code(), Some(2));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(codes(&report), expected(&[("unknown", code)]));
    }
}

#[test]
fn a_namespace_without_models_names_those_that_are() {
    let recorded = Recorded::new("weight-1");
    let output = recorded.command(&["--namespace", "other"]);
    assert_eq!(output.status.code(), Some(2));
    let text = words(&output);
    assert!(text.contains("there are dynamo/kvdelta-test"), "{text}");
}

#[test]
fn json_has_these_keys() {
    let recorded = Recorded::new("weight-0");
    let output = recorded.command(&["--json"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let keys =
        |value: &Value| -> Vec<String> { value.as_object().unwrap().keys().cloned().collect() };
    assert_eq!(
        keys(&report),
        [
            "discovery",
            "exit_code",
            "findings",
            "frontends",
            "notes",
            "pools",
            "problems",
            "unknowns",
            "version",
            "warnings",
            "watched_seconds"
        ]
    );
    assert_eq!(
        keys(&report["findings"][0]),
        ["action", "code", "seen", "severity", "sources", "subjects"]
    );
    assert_eq!(
        keys(&report["pools"][0]),
        [
            "aggregated_workers",
            "block_size_tokens",
            "decode_workers",
            "model",
            "namespace",
            "prefill_workers"
        ]
    );
}

#[test]
fn a_page_that_is_no_metrics_is_said() {
    let recorded = Recorded::new("weight-1");
    let page = serve(|_| {
        Answers::from([(
            "/metrics".to_owned(),
            vec!["<html><p>hello</p></html>".to_owned()],
        )])
    });
    let folder = recorded.discovery.path().to_str().unwrap();
    let output = doctor(&["--file-kv", folder, "--frontend", &page]);
    assert_eq!(output.status.code(), Some(2));
    let text = words(&output);
    assert!(text.contains("no metrics in the answer"), "{text}");
}

/// The key of a record, from the name of its file.
fn unescaped(name: &str) -> String {
    let mut parts = name.split('%');
    let mut key = parts.next().unwrap().to_owned();
    for part in parts {
        key.push(u8::from_str_radix(&part[..2], 16).unwrap().into());
        key.push_str(&part[2..]);
    }
    key
}

/// What etcd 3.4 answers for one bucket: recorded in form, filled with the records of a folder.
fn etcd_range(discovery: &Path, bucket: &str) -> (String, String) {
    let key = STANDARD.encode(format!("{bucket}/"));
    let range_end = STANDARD.encode(format!("{bucket}0"));
    let pairs: Vec<Value> = fs::read_dir(discovery.join(bucket))
        .unwrap()
        .map(|file| {
            let path = file.unwrap().path();
            let name = unescaped(path.file_name().unwrap().to_str().unwrap());
            json!({
                "key": STANDARD.encode(format!("{bucket}/{name}")),
                "create_revision": "9", "mod_revision": "9", "version": "1",
                "value": STANDARD.encode(fs::read(&path).unwrap()),
            })
        })
        .collect();
    let header = json!({"cluster_id": "1", "member_id": "2", "revision": "10", "raft_term": "2"});
    let answer = if pairs.is_empty() {
        json!({ "header": header })
    } else {
        json!({"header": header, "count": pairs.len().to_string(), "kvs": pairs})
    };
    let request = json!({ "key": key, "range_end": range_end });
    (format!("/v3/kv/range{request}"), answer.to_string())
}

const BUCKETS: [&str; 3] = ["v1/mdc", "v1/event_sources", "v1/event_channels"];

#[test]
fn etcd_as_a_stand_in_plays_it_holds_the_same_deployment() {
    let recorded = Recorded::new("weight-1");
    let discovery = recorded.discovery.path().to_owned();
    let etcd = serve(|_| {
        BUCKETS
            .iter()
            .map(|bucket| etcd_range(&discovery, bucket))
            .map(|(request, answer)| (request, vec![answer]))
            .collect()
    });
    // The first member does not answer.
    let members = format!("http://127.0.0.1:9,{etcd}");
    let output = doctor(&[
        "--etcd",
        &members,
        "--frontend",
        &recorded.frontend(),
        "--json",
    ]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(codes(&report), expected(&[NO_CLAIMS, TAKEN]));
    assert_eq!(report["pools"][0]["decode_workers"], 2);
    assert_eq!(output.status.code(), Some(0));
}

/// A real etcd, ended with the test.
struct Etcd {
    process: Child,
    url: String,
    _data: TempDir,
}

impl Etcd {
    fn start() -> Self {
        let [client, peer] = [(); 2].map(|()| {
            let port = TcpListener::bind(("127.0.0.1", 0)).unwrap();
            format!("http://{}", port.local_addr().unwrap())
        });
        let data = tempfile::tempdir().unwrap();
        let process = Command::new("etcd")
            .arg("--data-dir")
            .arg(data.path())
            .args(["--listen-client-urls", &client])
            .args(["--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer])
            .args(["--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("default={peer}")])
            .stderr(Stdio::null())
            .spawn()
            .expect("etcd is not in PATH");
        Self {
            process,
            url: client,
            _data: data,
        }
    }

    /// Puts a record, patiently: etcd may just have started.
    fn put(&self, key: &str, value: &[u8]) {
        let url = format!("{}/v3/kv/put", self.url);
        let body = json!({"key": STANDARD.encode(key), "value": STANDARD.encode(value)});
        let client = reqwest::blocking::Client::builder()
            .no_proxy()
            .build()
            .unwrap();
        for _ in 0..100 {
            let answer = client.post(&url).json(&body).send();
            if answer.is_ok_and(|answer| answer.status().is_success()) {
                return;
            }
            thread::sleep(Duration::from_millis(100));
        }
        panic!("{url} does not take {key}");
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
#[ignore = "needs etcd 3.4 or newer in PATH"]
fn real_etcd_holds_the_same_deployment() {
    let recorded = Recorded::new("weight-1");
    let etcd = Etcd::start();
    for bucket in BUCKETS {
        for file in fs::read_dir(recorded.discovery.path().join(bucket)).unwrap() {
            let path = file.unwrap().path();
            let name = unescaped(path.file_name().unwrap().to_str().unwrap());
            etcd.put(&format!("{bucket}/{name}"), &fs::read(&path).unwrap());
        }
    }
    // A neighbour of the prefix that must not be read.
    etcd.put("v1/mdcx/other", b"{");
    let frontend = recorded.frontend();
    let output = doctor(&["--etcd", &etcd.url, "--frontend", &frontend, "--json"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(codes(&report), expected(&[NO_CLAIMS, TAKEN]));
    assert_eq!(report["pools"][0]["decode_workers"], 2);
}

#[test]
fn etcd_that_is_empty_away_or_another_server_is_not_healthy() {
    let empty = tempfile::tempdir().unwrap();
    for bucket in BUCKETS {
        fs::create_dir_all(empty.path().join(bucket)).unwrap();
    }
    let empty = serve(|_| {
        BUCKETS
            .iter()
            .map(|bucket| etcd_range(empty.path(), bucket))
            .map(|(request, answer)| (request, vec![answer]))
            .collect()
    });
    let other = serve(|_| Answers::new());
    let recorded = Recorded::new("weight-1");
    for (etcd, code) in [
        (empty.as_str(), "no-model"),
        (&other, "discovery-unreadable"),
        ("http://127.0.0.1:9", "discovery-unreadable"),
        ("https://127.0.0.1:9", "discovery-unreadable"),
    ] {
        let output = doctor(&["--etcd", etcd, "--frontend", &recorded.frontend(), "--json"]);
        assert_eq!(output.status.code(), Some(2), "{etcd}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(codes(&report), expected(&[("unknown", code)]), "{etcd}");
    }
}

#[test]
fn a_back_end_that_cannot_be_read_is_named() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvdelta"));
    let output = command
        .arg("doctor")
        .args(["--frontend", "http://127.0.0.1:9"])
        .env("DYN_DISCOVERY_BACKEND", "kubernetes")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let text = words(&output);
    assert!(text.contains("DYN_DISCOVERY_BACKEND=kubernetes"), "{text}");
}

#[test]
fn passwords_of_addresses_are_not_shown() {
    let recorded = Recorded::new("weight-1");
    let folder = recorded.discovery.path().to_str().unwrap();
    let with_password = |url: &str| url.replace("http://", "http://user:secret@");
    let readable = with_password(&recorded.frontend());
    let worker = with_password(&format!("{}/worker-1/metrics", recorded.base));
    for json in [&["--json"][..], &[]] {
        for arguments in [
            [
                "--file-kv",
                folder,
                "--frontend",
                &readable,
                "--metrics",
                &worker,
            ],
            [
                "--etcd",
                "http://user:secret@127.0.0.1:9,https://user:secret@a",
                "--frontend",
                "http://user:secret@127.0.0.1:9",
                "--metrics",
                "user:secret@127.0.0.1:9",
            ],
        ] {
            let output = doctor(&[&arguments[..], json].concat());
            for text in [&output.stdout, &output.stderr] {
                let text = String::from_utf8_lossy(text);
                assert!(!text.contains("secret"), "{text}");
            }
            assert!(words(&output).contains("127.0.0.1"), "{arguments:?}");
        }
    }
}

#[test]
fn answers_and_files_beyond_the_limit_are_not_read() {
    let recorded = Recorded::new("weight-1");
    let folder = recorded.discovery.path().to_str().unwrap();
    let long = serve(|_| Answers::from([("/metrics".to_owned(), vec!["a 1\n".repeat(17 << 20)])]));
    let output = doctor(&["--file-kv", folder, "--frontend", &long]);
    let text = words(&output);
    for part in ["limit of 64 MiB", &long, "UNKNOWN frontend-unreadable"] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    let file = recorded.discovery.path().join("v1/mdc/long");
    fs::File::create(&file)
        .unwrap()
        .set_len((64 << 20) + 1)
        .unwrap();
    let output = recorded.command(&[]);
    assert_eq!(output.status.code(), Some(2));
    let text = words(&output);
    for part in ["limit of 64 MiB", file.to_str().unwrap()] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
}

#[test]
fn control_characters_of_a_card_are_escaped() {
    let recorded = Recorded::new("weight-1");
    let card = json!({
        "type": "Model", "namespace": "n", "component": "c\u{9b}2J", "instance_id": 7,
        "card_json": {"display_name": "evil\u{1b}[2J\nPROBLEM none \u{202e}"},
    });
    let path = recorded.discovery.path().join("v1/mdc/evil");
    fs::write(path, card.to_string()).unwrap();
    let output = recorded.command(&[]);
    let text = String::from_utf8_lossy(&output.stdout);
    let raw = |letter: char| letter != '\n' && letter.is_control() || letter == '\u{202e}';
    assert!(!text.contains(raw), "{text:?}");
    assert!(
        words(&output).contains(r"evil\u{1b}[2J\nPROBLEM none \u{202e}"),
        "{text}"
    );
}

#[test]
fn a_report_that_cannot_be_written_is_an_error() {
    let recorded = Recorded::new("weight-1");
    let folder = recorded.discovery.path().to_str().unwrap();
    let frontend = recorded.frontend();
    for json in [&["--json"][..], &[]] {
        let (reader, closed) = std::io::pipe().unwrap();
        drop(reader);
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        for stdout in [Stdio::from(full), Stdio::from(closed)] {
            let output = Command::new(env!("CARGO_BIN_EXE_kvdelta"))
                .args(["doctor", "--file-kv", folder, "--frontend", &frontend])
                .args(json)
                .stdout(stdout)
                .output()
                .unwrap();
            let error = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{error}");
            assert!(error.contains("cannot write the report"), "{error}");
        }
    }
}

#[test]
fn an_empty_address_is_refused() {
    for (option, value) in [("--etcd", "a,,"), ("--frontend", ""), ("--metrics", " ")] {
        let output = doctor(&[option, value]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        for part in [option, "an address is empty"] {
            assert!(error.contains(part), "{error}");
        }
    }
}
