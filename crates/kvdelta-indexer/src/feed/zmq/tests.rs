use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use super::{
    BadEndpoint, EngineFeed, PublisherFeed, Timing, dynamo_frame, endpoint_of_rank, engine_frame,
    replay_message,
};
use crate::feed::test_ports::free_ports;
use crate::feed::{Answer, FeedId, Frame, Limits, Outlet, RecoverError, Signal, Source, queue};
use crate::ids::WorkerRank;
use crate::wire::normalize::Dialect;

const OF: WorkerRank = WorkerRank::new(7, 1);
/// Against hanging; no test expects it to pass.
const FOREVER: Duration = Duration::from_secs(60);
const QUICK: Timing = Timing {
    connect: Duration::from_millis(500),
    first_wait: Duration::from_millis(10),
    last_wait: Duration::from_millis(50),
    silence: Duration::from_secs(600),
    replay: Duration::from_millis(500),
};

fn message(frames: &[&[u8]]) -> ZmqMessage {
    let mut frames = frames.iter().map(|frame| Bytes::copy_from_slice(frame));
    let mut message = ZmqMessage::from(frames.next().unwrap_or_default());
    frames.for_each(|frame| message.push_back(frame));
    message
}

fn batch(seq: u64) -> ZmqMessage {
    message(&[b"", &seq.to_be_bytes(), format!("batch {seq}").as_bytes()])
}

/// Publishes batches from 0 on without an end.
struct Publisher(JoinHandle<()>);

impl Publisher {
    async fn start(port: u16, messages: impl Fn(u64) -> ZmqMessage + Send + 'static) -> Self {
        let mut socket = PubSocket::new();
        let endpoint = format!("tcp://127.0.0.1:{port}");
        // The port of the one before may take a moment to be free.
        while socket.bind(&endpoint).await.is_err() {
            sleep(Duration::from_millis(10)).await;
        }
        Self(tokio::spawn(async move {
            for seq in 0.. {
                socket.send(messages(seq)).await.unwrap();
                sleep(Duration::from_millis(2)).await;
            }
        }))
    }

    async fn stop(self) {
        self.0.abort();
        assert!(self.0.await.unwrap_err().is_cancelled());
    }
}

fn feed(port: u16, replay: Option<u16>, timing: Timing) -> EngineFeed {
    // As configured: the ports of rank 0.
    let of_rank_0 = |port: u16| format!("tcp://127.0.0.1:{}", port - 1);
    let replay = replay.map(of_rank_0);
    let endpoint = of_rank_0(port);
    EngineFeed::new(
        OF,
        Dialect::Vllm,
        1,
        &endpoint,
        replay.as_deref(),
        "",
        timing,
    )
    .unwrap()
}

fn listen(source: impl Source + 'static, limits: Limits) -> Outlet {
    let (inlet, outlet) = queue(limits);
    tokio::spawn(async move {
        let tap = inlet.tap(FeedId(0));
        drop(inlet);
        source.listen(tap).await;
    });
    outlet
}

async fn next(outlet: &mut Outlet) -> Signal {
    let heard = timeout(FOREVER, outlet.next()).await.unwrap().unwrap();
    heard.signal
}

async fn next_seq(outlet: &mut Outlet) -> u64 {
    match next(outlet).await {
        Signal::Frame(Frame::Engine { seq, payload, .. }) => {
            assert_eq!(payload, format!("batch {seq}"));
            seq
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_publisher_that_starts_again_under_its_address_is_found_again() {
    let [port] = free_ports();
    let mut outlet = listen(feed(port, None, QUICK), Limits::default());
    for _life in 0..3 {
        let publisher = Publisher::start(port, batch).await;
        assert!(matches!(next(&mut outlet).await, Signal::Connected));
        let first = next_seq(&mut outlet).await;
        assert_eq!(next_seq(&mut outlet).await, first + 1);
        publisher.stop().await;
        loop {
            match next(&mut outlet).await {
                Signal::Frame(_) => {}
                Signal::Disconnected => break,
                other => panic!("{other:?}"),
            }
        }
    }
}

#[tokio::test]
async fn a_peer_that_accepts_and_says_nothing_does_not_hold_the_feed() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = silent.local_addr().unwrap().port();
    let mut outlet = listen(feed(port, None, QUICK), Limits::default());
    let (_held, _) = silent.accept().await.unwrap();
    drop(silent);
    let _publisher = Publisher::start(port, batch).await;
    assert!(matches!(next(&mut outlet).await, Signal::Connected));
    next_seq(&mut outlet).await;
}

#[tokio::test]
async fn a_silent_connection_is_tested_and_told_alive_until_the_publisher_is_gone() {
    let [port] = free_ports();
    let mut socket = PubSocket::new();
    let endpoint = format!("tcp://127.0.0.1:{port}");
    socket.bind(&endpoint).await.unwrap();
    let timing = Timing {
        silence: Duration::from_millis(100),
        ..QUICK
    };
    let mut outlet = listen(feed(port, None, timing), Limits::default());
    assert!(matches!(next(&mut outlet).await, Signal::Connected));
    assert!(matches!(next(&mut outlet).await, Signal::Alive));
    assert!(matches!(next(&mut outlet).await, Signal::Alive));
    // Until something came over it, the connection is made anew each time.
    let mut sent = 0;
    let mut heard = Vec::new();
    while heard.is_empty() {
        // A publisher does not say from when on it sends to a new subscriber.
        sleep(Duration::from_millis(20)).await;
        socket.send(batch(sent)).await.unwrap();
        sent += 1;
        if let Signal::Frame(Frame::Engine { seq, .. }) = next(&mut outlet).await {
            heard.push(seq);
        }
    }
    // From then on it stays, subscribed more than once and told once.
    let mut tests = 0;
    while tests < 3 {
        match next(&mut outlet).await {
            Signal::Alive => tests += 1,
            Signal::Frame(Frame::Engine { seq, .. }) => heard.push(seq),
            other => panic!("{other:?}"),
        }
    }
    socket.send(batch(sent)).await.unwrap();
    while heard.last() != Some(&sent) {
        if let Signal::Frame(Frame::Engine { seq, .. }) = next(&mut outlet).await {
            heard.push(seq);
        }
    }
    assert!(
        heard.is_sorted() && heard.windows(2).all(|pair| pair[0] != pair[1]),
        "{heard:?}"
    );
    drop(socket);
    while !matches!(next(&mut outlet).await, Signal::Disconnected) {}
}

#[tokio::test]
async fn what_finds_no_room_is_counted_and_told_where_it_is_missing() {
    let [port] = free_ports();
    let limits = Limits {
        frames: 4,
        ..Limits::default()
    };
    let mut outlet = listen(feed(port, None, QUICK), limits);
    let publisher = Publisher::start(port, batch).await;
    let counts = Arc::clone(outlet.counts());
    while counts.dropped() < 20 {
        sleep(Duration::from_millis(5)).await;
    }
    // Told though no message follows.
    publisher.stop().await;
    assert!(matches!(next(&mut outlet).await, Signal::Connected));
    let mut expected = None;
    let (mut queued, mut dropped) = (0, 0);
    loop {
        match next(&mut outlet).await {
            Signal::Frame(Frame::Engine { seq, .. }) => {
                assert!(expected.is_none_or(|expected| expected == seq));
                expected = Some(seq + 1);
                queued += 1;
            }
            Signal::Dropped { frames } => {
                expected = expected.map(|expected| expected + frames);
                dropped += frames;
            }
            Signal::Disconnected => break,
            other => panic!("{other:?}"),
        }
    }
    assert!(queued >= 3);
    assert!(dropped >= 20);
    assert_eq!((queued, dropped), (counts.queued(), counts.dropped()));
}

#[tokio::test]
async fn bytes_are_bounded_too_and_a_message_larger_than_all_is_dropped() {
    let [port] = free_ports();
    let limits = Limits {
        bytes: 64,
        ..Limits::default()
    };
    let messages = |seq: u64| {
        let payload = vec![0; if seq.is_multiple_of(2) { 65 } else { 40 }];
        message(&[b"", &seq.to_be_bytes(), &payload])
    };
    let mut outlet = listen(feed(port, None, QUICK), limits);
    let _publisher = Publisher::start(port, messages).await;
    assert!(matches!(next(&mut outlet).await, Signal::Connected));
    let mut odd = 0;
    while odd < 5 {
        match next(&mut outlet).await {
            Signal::Frame(Frame::Engine { seq, .. }) => {
                assert_eq!(seq % 2, 1);
                odd += 1;
            }
            Signal::Dropped { frames } => assert!(frames > 0),
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn messages_that_are_none_are_counted_and_leave_their_neighbours_alone() {
    let [port] = free_ports();
    let messages = |seq: u64| match seq % 6 {
        0 => batch(seq),
        1 => message(&[b"x"]),
        2 => message(&[b"", b""]),
        3 => message(&[b"", b"seven!!", b"batch"]),
        4 => message(&[b"", &seq.to_be_bytes(), b"batch", b"more"]),
        _ => message(&[b"", &[0xff; 300], &[0xff; 300]]),
    };
    let mut outlet = listen(feed(port, None, QUICK), Limits::default());
    let _publisher = Publisher::start(port, messages).await;
    assert!(matches!(next(&mut outlet).await, Signal::Connected));
    let mut good = Vec::new();
    while good.len() < 3 {
        match next(&mut outlet).await {
            Signal::Frame(Frame::Engine { seq, .. }) => good.push(seq),
            Signal::Dropped { frames } => assert!((1..=5).contains(&frames)),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((good[1], good[2]), (good[0] + 6, good[0] + 12));
    assert!(outlet.counts().malformed() >= 10);
}

#[tokio::test]
async fn a_feed_ends_when_nobody_listens() {
    let (inlet, outlet) = queue(Limits::default());
    let [port] = free_ports();
    let source = feed(port, None, QUICK);
    let tap = inlet.tap(FeedId(0));
    drop(outlet);
    timeout(FOREVER, source.listen(tap)).await.unwrap();
}

/// How a replay server answers.
#[derive(Clone, Copy)]
struct Answers {
    /// SGLang and older vLLM send no topic.
    topic: bool,
    kept: (u64, u64),
    /// At most so many of one answer's messages leave the server, as at a high-water mark.
    room: usize,
    ends: bool,
}

const VLLM: Answers = Answers {
    topic: true,
    kept: (0, 10),
    room: 100,
    ends: true,
};

async fn replay_server(answers: Answers) -> u16 {
    let mut socket = RouterSocket::new();
    let endpoint = socket.bind("tcp://127.0.0.1:0").await.unwrap();
    let port = endpoint.to_string().rsplit_once(':').unwrap().1.parse();
    tokio::spawn(async move {
        while let Ok(request) = socket.recv().await {
            assert_eq!(request.len(), 3, "identity, empty, sequence number");
            assert!(request.get(1).unwrap().is_empty());
            let from: [u8; 8] = request.get(2).unwrap().as_ref().try_into().unwrap();
            let from = u64::from_be_bytes(from);
            let mut frames: Vec<(u64, String)> = (answers.kept.0..answers.kept.1)
                .filter(|seq| *seq >= from)
                .map(|seq| (seq, format!("batch {seq}")))
                .collect();
            // What is dropped lies in the middle: the server catches up at the end.
            if frames.len() > answers.room {
                frames.drain(answers.room..frames.len() - 1);
            }
            if answers.ends {
                frames.push((u64::MAX, String::new()));
            }
            for (seq, payload) in frames {
                let mut reply = message(&[request.get(0).unwrap(), b""]);
                if answers.topic {
                    reply.push_back(Bytes::new());
                }
                reply.push_back(Bytes::copy_from_slice(&seq.to_be_bytes()));
                reply.push_back(payload.into());
                // Who asks may be gone already.
                let _ = socket.send(reply).await;
            }
        }
    });
    port.unwrap()
}

async fn replay(server: u16, from: u64) -> Result<Vec<u64>, RecoverError> {
    let source = feed(server, Some(server), QUICK);
    let answer = timeout(FOREVER, source.replay(OF, from)).await.unwrap()?;
    let Answer::Frames(frames) = answer else {
        panic!("{answer:?}");
    };
    let mut seqs = Vec::new();
    for frame in frames {
        let Frame::Engine { seq, payload, .. } = frame else {
            panic!("{frame:?}");
        };
        assert_eq!(payload, format!("batch {seq}"));
        seqs.push(seq);
    }
    Ok(seqs)
}

#[tokio::test]
async fn a_replay_tells_what_is_kept_from_a_number_on() {
    let sglang = Answers {
        topic: false,
        ..VLLM
    };
    for answers in [VLLM, sglang] {
        let server = replay_server(answers).await;
        assert_eq!(replay(server, 7).await, Ok(vec![7, 8, 9]));
        assert_eq!(replay(server, 10).await, Ok(vec![]), "nothing newer");
        assert_eq!(replay(server, 0).await.unwrap().len(), 10);
    }
    let rolled = Answers {
        kept: (5, 8),
        ..VLLM
    };
    let server = replay_server(rolled).await;
    assert_eq!(replay(server, 2).await, Ok(vec![5, 6, 7]));
}

#[tokio::test]
async fn a_replay_with_holes_is_asked_for_again_from_the_hole() {
    let cut = Answers { room: 3, ..VLLM };
    let server = replay_server(cut).await;
    assert_eq!(replay(server, 1).await, Ok((1..10).collect()));
    // The end got lost as well.
    let endless = Answers { ends: false, ..cut };
    let server = replay_server(endless).await;
    let ended = replay(server, 1).await;
    assert!(
        matches!(ended, Err(RecoverError::TimedOut { .. })),
        "{ended:?}"
    );
}

#[tokio::test]
async fn a_replay_that_cannot_be_had_is_an_error_that_says_why() {
    let [port] = free_ports();
    let without = feed(port, None, QUICK).replay(OF, 0).await;
    assert!(matches!(without, Err(RecoverError::NotOffered { .. })));
    let nobody = feed(port, Some(port), QUICK).replay(OF, 0).await;
    assert!(
        matches!(nobody, Err(RecoverError::Unreachable { .. })),
        "{nobody:?}"
    );
    let silent = Answers {
        kept: (0, 0),
        ends: false,
        ..VLLM
    };
    let error = replay(replay_server(silent).await, 0).await.unwrap_err();
    let error = error.to_string();
    assert!(error.contains("7/1") && error.contains("500ms"), "{error}");
}

#[test]
fn a_ranks_port_is_that_of_rank_0_and_the_rank() {
    let at = |endpoint: &str, rank| endpoint_of_rank(endpoint, rank);
    assert_eq!(at("tcp://10.0.0.1:5557", 0).unwrap(), "tcp://10.0.0.1:5557");
    assert_eq!(at("tcp://[::1]:5557", 1).unwrap(), "tcp://[::1]:5558");
    for endpoint in ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://[::]:5557"] {
        let wildcard = BadEndpoint::Wildcard(endpoint.to_owned());
        assert_eq!(at(endpoint, 0), Err(wildcard));
    }
    for endpoint in [
        "",
        "ipc:///tmp/x",
        "tcp://host",
        "tcp://:1",
        "tcp://h:x",
        "tcp://h:70000",
    ] {
        assert_eq!(
            at(endpoint, 0),
            Err(BadEndpoint::NotTcp(endpoint.to_owned()))
        );
    }
    for (endpoint, rank) in [
        ("tcp://h:65535", 1),
        ("tcp://h:1", u32::MAX),
        ("tcp://h:0", 0),
    ] {
        let error = at(endpoint, rank).unwrap_err();
        assert!(matches!(error, BadEndpoint::NoPort { .. }), "{error}");
    }
}

#[test]
fn frames_are_read_whatever_comes() {
    let mut envelope = vec![1, 0, 0, 0, 2];
    envelope.extend(b"{}");
    let publisher = 42_u64.to_be_bytes();
    let good = message(&[b"kv-events", &publisher, &0_u64.to_be_bytes(), &envelope]);
    let expected = Frame::Dynamo {
        envelope: Bytes::from_static(b"{}"),
    };
    assert_eq!(dynamo_frame(42, &good), Ok(expected));
    assert!(dynamo_frame(43, &good).is_err());
    for body in [
        &b""[..],
        &[1, 0, 0, 0],
        &[2, 0, 0, 0, 0],
        &[1, 0, 0, 0, 9, 1],
        &[1, 0, 0, 0, 0, 1],
    ] {
        let bad = message(&[b"kv-events", &publisher, &0_u64.to_be_bytes(), body]);
        assert!(dynamo_frame(42, &bad).is_err(), "{body:?}");
    }
    assert!(replay_message(&message(&[b"x", b"12345678", b""])).is_none());
    assert!(replay_message(&message(&[b"", b"1234567", b""])).is_none());
    assert!(replay_message(&message(&[b""])).is_none());
    assert!(engine_frame(Dialect::Vllm, &message(&[b"", b"12345678"])).is_err());
}

#[tokio::test]
async fn dynamos_own_sockets_are_heard() {
    let [port] = free_ports();
    let messages = |seq: u64| {
        let mut body = vec![1, 0, 0, 0, 8];
        body.extend(seq.to_be_bytes());
        message(&[
            b"kv-events",
            &42_u64.to_be_bytes(),
            &seq.to_be_bytes(),
            &body,
        ])
    };
    let endpoint = format!("tcp://127.0.0.1:{port}");
    let source = PublisherFeed::new(OF, 42, &endpoint, None, QUICK).unwrap();
    let mut outlet = listen(source, Limits::default());
    let _publisher = Publisher::start(port, messages).await;
    assert!(matches!(next(&mut outlet).await, Signal::Connected));
    assert!(matches!(
        next(&mut outlet).await,
        Signal::Frame(Frame::Dynamo { .. })
    ));
}
