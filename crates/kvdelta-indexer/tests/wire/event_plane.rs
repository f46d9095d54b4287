//! Dynamo's event plane, encoded with Dynamo's own types.

use dynamo_kv_router::protocols::{
    BlockExtraInfo, BlockMmObjectInfo, ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData,
    KvCacheRemoveData, KvCacheStoreData, KvCacheStoredBlockData, LocalBlockHash, ResidencyDomain,
    RouterEvent as Theirs, StorageTier,
};
use kvdelta_indexer::{
    BadBatch, BlockHash, Change, Copies, EngineHash, Envelope, RouterEvent, Skipped, Source,
    Stored, StoredBlock, Tier, WireRouterEvent, WorkerRank, router_events,
};

fn theirs(id: u64, data: KvCacheEventData, tier: StorageTier) -> Theirs {
    let event = KvCacheEvent {
        event_id: id,
        data,
        dp_rank: 3,
    };
    Theirs::with_storage_tier(42, event, tier)
}

fn store(parent: Option<u64>, start_position: Option<u32>) -> KvCacheEventData {
    KvCacheEventData::Stored(KvCacheStoreData {
        parent_hash: parent.map(ExternalSequenceBlockHash),
        start_position,
        blocks: vec![KvCacheStoredBlockData {
            block_hash: ExternalSequenceBlockHash(u64::MAX),
            tokens_hash: LocalBlockHash(7),
            mm_extra_info: Some(BlockExtraInfo {
                mm_objects: vec![BlockMmObjectInfo {
                    mm_hash: 9,
                    offsets: vec![(0, 4)],
                }],
            }),
        }],
    })
}

fn remove() -> KvCacheEventData {
    KvCacheEventData::Removed(KvCacheRemoveData {
        block_hashes: vec![ExternalSequenceBlockHash(u64::MAX)],
    })
}

fn ours(id: u64, change: Result<Change, Skipped>) -> RouterEvent {
    RouterEvent {
        of: WorkerRank::new(42, 3),
        id,
        change,
    }
}

fn stored(parent: Option<u64>) -> Change {
    Change::Stored(Stored {
        tier: Tier::Device,
        parent: parent.map(EngineHash),
        namespace: None,
        blocks: vec![StoredBlock {
            block: BlockHash(7),
            engine: EngineHash(u64::MAX),
        }],
        copies: Copies::Single,
        source: None,
    })
}

#[test]
fn what_dynamo_publishes_is_read() {
    let device = StorageTier::Device;
    let mut of_owner = theirs(6, KvCacheEventData::Cleared, device);
    of_owner.residency_domain =
        dynamo_kv_router::protocols::WireResidencyDomain::explicit(ResidencyDomain::CacheOwner);
    let removed = |tier| Change::Removed {
        tier,
        engine_hashes: vec![EngineHash(u64::MAX)],
    };
    let shared = Skipped::SharedStorage("external".to_owned());
    let cases = [
        (theirs(1, store(None, None), device), Ok(stored(None))),
        (
            theirs(2, store(Some(5), Some(8)), device),
            Ok(stored(Some(5))),
        ),
        (
            theirs(3, store(None, Some(8)), device),
            Err(Skipped::NoParent(8)),
        ),
        (
            theirs(4, remove(), StorageTier::HostPinned),
            Ok(removed(Tier::Host)),
        ),
        (
            theirs(5, remove(), StorageTier::Disk),
            Ok(removed(Tier::Disk)),
        ),
        (of_owner, Err(Skipped::OtherOwner("cache_owner".to_owned()))),
        (theirs(7, remove(), StorageTier::External), Err(shared)),
        (
            theirs(8, KvCacheEventData::Cleared, device),
            Ok(Change::Cleared),
        ),
    ];
    let (events, expected): (Vec<_>, Vec<_>) = cases.into_iter().unzip();
    let expected: Vec<_> = (1..)
        .zip(expected)
        .map(|(id, change)| ours(id, change))
        .collect();

    let payload = rmp_serde::to_vec_named(&events).expect("MessagePack");
    let found: Result<Vec<_>, _> = router_events(&payload).expect("an array").collect();
    assert_eq!(found.as_ref(), Ok(&expected));

    let json = serde_json::to_string(&events).expect("JSON");
    let dump: Vec<WireRouterEvent> = serde_json::from_str(&json).expect("a dump");
    let found: Vec<_> = dump.into_iter().map(RouterEvent::from).collect();
    assert_eq!(found, expected);
}

#[test]
fn a_bad_event_is_skipped_alone() {
    let good = serde_json::to_value(theirs(1, remove(), StorageTier::Device)).expect("JSON");
    let with = |field: &str, value: serde_json::Value| {
        let mut event = good.clone();
        event[field] = value;
        event
    };
    let events = serde_json::json!([
        good,
        with("event", "no event".into()),
        with("storage_tier", "tape".into()),
        with("residency_domain", "tomorrow".into()),
        with("residency_domain", serde_json::Value::Null),
        with("field_of_tomorrow", 1.into()),
    ]);
    let payload = rmp_serde::to_vec_named(&events).expect("MessagePack");
    let found: Vec<_> = router_events(&payload)
        .expect("an array")
        .map(|event| event.and_then(|event| event.change.map(|_| event.id)))
        .map(|event| event.map_err(|why| (why.as_label(), why.may_hide_changes())))
        .collect();
    assert_eq!(
        found,
        [
            Ok(1),
            Err(("malformed", true)),
            Err(("unknown_medium", false)),
            Err(("unknown_ownership", true)),
            Err(("unknown_ownership", true)),
            Ok(1),
        ]
    );
}

#[test]
fn source_is_kept_and_old_readers_ignore_it() {
    for (source, kept) in [
        (serde_json::json!("local"), Some(Source::Local)),
        (serde_json::json!("transferred"), Some(Source::Transferred)),
        (serde_json::json!("stolen"), None),
        (serde_json::json!([1]), None),
    ] {
        let event = theirs(1, store(None, None), StorageTier::Device);
        let mut event = serde_json::to_value(event).expect("JSON");
        event["source"] = source;
        let payload = rmp_serde::to_vec_named(&[event]).expect("MessagePack");
        let old_reader: Vec<Theirs> = rmp_serde::from_slice(&payload).expect("ignores it");
        assert_eq!(old_reader[0].event.event_id, 1);
        let event = router_events(&payload).expect("an array").next();
        match event.expect("one").expect("an event").change {
            Ok(Change::Stored(stored)) => assert_eq!(stored.source, kept),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn envelope() {
    #[derive(serde::Serialize)]
    struct Sent<'a> {
        publisher_id: u64,
        sequence: u64,
        published_at: u64,
        topic: &'a str,
        payload: Payload<'a>,
    }
    struct Payload<'a>(&'a [u8]);
    impl serde::Serialize for Payload<'_> {
        fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
            to.serialize_bytes(self.0)
        }
    }
    let sent = Sent {
        publisher_id: u64::MAX,
        sequence: 2,
        published_at: 3,
        topic: "kv-events",
        payload: Payload(&[0x90]),
    };
    let bytes = rmp_serde::to_vec_named(&sent).expect("MessagePack");
    let envelope = Envelope::decode(&bytes).expect("an envelope");
    assert_eq!(
        (
            envelope.publisher_id,
            envelope.sequence,
            envelope.published_at
        ),
        (u64::MAX, 2, 3)
    );
    assert_eq!(
        (envelope.topic, envelope.payload),
        ("kv-events", &[0x90][..])
    );
    assert_eq!(
        router_events(envelope.payload).expect("an array").count(),
        0
    );

    let error = Envelope::decode(&bytes[..9]).expect_err("cut short");
    assert_eq!(error, BadBatch::Broken(9));
    let error = Envelope::decode(&[0x90]).expect_err("an array");
    assert_eq!(
        error.to_string(),
        "envelope of a batch of KV events is an array"
    );
}
