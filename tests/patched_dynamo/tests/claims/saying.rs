// SPDX-License-Identifier: Apache-2.0

//! What a claim says, and where there is none.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::fleet::{Answer, Ask, Builder, Spec, Trace, capability, prompt, run};
use crate::scene::{
    BLOCK, HELD, Scene, WEIGHT, at_rest, engine_hash, hold, is_claim, longer, pair, refusal,
};

#[test]
fn a_claim_says_what_its_worker_holds() -> Result<()> {
    run(async |trace| {
        let scene = Scene::start(&trace, pair(Spec::default())?).await?;
        let (fleet, prefix) = (&scene.fleet, &scene.prefix);
        // At most what ends before the last token.
        for (tokens, blocks) in [
            (HELD * BLOCK + 20, HELD),
            (HELD * BLOCK + 1, HELD),
            (HELD * BLOCK, HELD - 1),
            (HELD * BLOCK - 1, HELD - 1),
            (5 * BLOCK + 3, 5),
            (5 * BLOCK + 1, 5),
            (5 * BLOCK, 4),
            (BLOCK + 1, 1),
        ] {
            let asked = &longer(prefix, 1)[..tokens];
            fleet.ask(Ask::new(asked)).await?.complete()?;
            let (prefill, decode) = (scene.prefill().received(), scene.holder().received());
            let (prefill, decode) = (prefill.last().unwrap(), decode.last().context("no leg")?);
            is_claim(prefill, scene.holder(), 0, blocks).with_context(|| format!("{tokens}"))?;
            assert_eq!(decode.id, prefill.id, "{tokens}");
            assert_eq!(decode.rank(), Some(0));
            scene.at_rest().await?;
        }
        assert!(fleet.decode[1].received().is_empty());
        // Less, when less is left.
        let gone: Vec<_> = (13..=HELD).map(engine_hash).collect();
        scene.holder().remove(0, &gone)?;
        fleet.holds(0, scene.holder(), 0, prefix, 12).await?;
        fleet.ask(scene.ask(2)).await?.complete()?;
        is_claim(
            scene.prefill().received().last().unwrap(),
            scene.holder(),
            0,
            12,
        )?;
        // A prompt of one block or less has nothing to leave out, one that nobody knows neither.
        for asked in [&prefix[..BLOCK], &prefix[..3], &prompt(9, 100)] {
            fleet.ask(Ask::new(asked)).await?.complete()?;
            assert_eq!(scene.prefill().received().last().unwrap().claim(), None);
            assert_eq!(refusal(&trace), "nothing_cached");
        }
        scene.at_rest().await
    })
}

#[test]
fn an_eagle_worker_needs_one_block_more() -> Result<()> {
    run(async |trace| {
        let eagle = |spec: Spec| Spec {
            eagle: true,
            ..spec
        };
        let fleet = Builder::new(WEIGHT)?
            .prefill(1, eagle(Spec::default()))
            .decode(1, eagle(Spec::claims()))
            .start(&trace)
            .await?;
        let decode = &fleet.decode[0];
        // A block of EAGLE is hashed with the token after it.
        let prefix = prompt(1, HELD * BLOCK + 1);
        let hashes: Vec<_> = (1..=HELD).map(engine_hash).collect();
        decode.store_after(0, None, &prefix, &hashes)?;
        fleet.holds(0, decode, 0, &prefix, HELD).await?;
        for (tokens, blocks) in [
            (HELD * BLOCK + 20, HELD),
            (HELD * BLOCK + 1, HELD - 1),
            (34, 3),
        ] {
            let asked = &longer(&prefix, 1)[..tokens];
            fleet.ask(Ask::new(asked)).await?.complete()?;
            is_claim(
                fleet.prefill[0].received().last().unwrap(),
                decode,
                0,
                blocks,
            )
            .with_context(|| format!("{tokens}"))?;
        }
        at_rest(&fleet).await
    })
}

/// What prefill and decode got for a request of a held prefix, in a fleet of one decode worker.
async fn told(trace: &Trace, weight: f64, decode: Spec) -> Result<(Value, Value)> {
    let fleet = Builder::new(weight)?
        .prefill(2, Spec::default())
        .decode(1, decode)
        .start(trace)
        .await?;
    let prefix = prompt(1, HELD * BLOCK);
    if fleet.decode[0].spec.events {
        hold(&fleet.decode[0], 0, &prefix)?;
    }
    // The prefill pool has a view of its own.
    fleet.prefill[1].store(0, &prefix)?;
    let asked = longer(&prefix, 1);
    // Weight 0 has no index of decode workers that could be asked.
    if fleet.decode[0].spec.events && weight > 0.0 {
        fleet.hold_known(&fleet.decode[0], 0, &prefix).await?;
    }
    fleet
        .prefill_holds(&fleet.prefill[1], &prefix, HELD)
        .await?;
    let before = fleet.prefill[1].received().len();
    fleet.ask(Ask::new(&asked)).await?.complete()?;
    at_rest(&fleet).await?;
    let (other, chosen) = (fleet.prefill[0].received(), fleet.prefill[1].received());
    ensure!(
        other.is_empty() && chosen.len() == before + 1,
        "prefill chose by another view"
    );
    let decode = fleet.decode[0].received();
    ensure!(decode.len() == before + 1);
    Ok((
        chosen[before].request.clone(),
        decode[before].request.clone(),
    ))
}

#[test]
fn there_is_no_claim_without_a_weight() -> Result<()> {
    run(async |trace| {
        let (mut with, decode_with) = told(&trace, WEIGHT, Spec::claims()).await?;
        let (without, decode_without) = told(&trace, 0.0, Spec::claims()).await?;
        let claim = with
            .as_object_mut()
            .and_then(|request| request.remove("decode_cache_info"));
        assert!(claim.is_some_and(|claim| !claim.is_null()));
        // Nothing else is said to anyone, and nothing is asked.
        assert_eq!(keys(&with), keys(&without));
        assert_eq!(keys(&decode_with), keys(&decode_without));
        assert_eq!(
            with["routing"].get("allowed_worker_ids"),
            without["routing"].get("allowed_worker_ids")
        );
        assert_eq!(with["token_ids"], without["token_ids"]);
        assert_eq!(
            decode_with["stop_conditions"],
            decode_without["stop_conditions"]
        );
        assert!(trace.spans("kv_router.query_decode") > 0);
        Ok(())
    })
}

fn keys(request: &Value) -> Vec<&String> {
    request
        .as_object()
        .map(|fields| fields.keys().collect())
        .unwrap_or_default()
}

#[test]
fn a_worker_that_does_not_settle_claims_gets_none() -> Result<()> {
    run(async |trace| {
        let tokens = Spec::default().block_tokens;
        let with = |key: &str, value: Value| {
            let mut told = capability(tokens);
            told[key] = value;
            Spec::default().advertises(told)
        };
        for (spec, reason) in [
            (Spec::default(), "not_advertised"),
            (Spec::default().advertises(json!("yes")), "not_advertised"),
            (with("version", json!(0)), "version"),
            (with("prefix_caching", json!(false)), "prefix_caching_off"),
            (with("block_size", json!(16)), "block_size"),
            (with("cache_groups", json!([])), "cache_groups"),
            (
                with("cache_groups", json!(["full_attention", "sliding_window"])),
                "cache_groups",
            ),
            (
                with("cache_groups", json!(["something new"])),
                "cache_groups",
            ),
        ] {
            let (prefill, _) = told(&trace, WEIGHT, spec).await?;
            assert_eq!(prefill.get("decode_cache_info"), None, "{reason}");
            assert_eq!(refusal(&trace), reason);
        }
        // What a later worker adds is no hindrance.
        for spec in [with("version", json!(7)), with("later", json!({"a": 1}))] {
            let (prefill, _) = told(&trace, WEIGHT, spec).await?;
            assert!(prefill["decode_cache_info"].is_object());
        }
        Ok(())
    })
}

#[test]
fn a_worker_without_events_gets_no_claims() -> Result<()> {
    run(async |trace| {
        let spec = Spec {
            events: false,
            ..Spec::claims()
        };
        let (prefill, _) = told(&trace, WEIGHT, spec).await?;
        assert_eq!(prefill.get("decode_cache_info"), None);
        assert_eq!(refusal(&trace), "nothing_cached");
        Ok(())
    })
}

#[test]
fn predicted_and_lower_tier_entries_make_no_claim() -> Result<()> {
    run(async |trace| {
        let fleet = Builder::new(WEIGHT)?
            .prefill(1, Spec::default())
            .decode(1, Spec::claims())
            .router(|router| router.kv_router_config.router_predicted_ttl_secs = Some(600.0))
            .start(&trace)
            .await?;
        let (prefill, decode) = (&fleet.prefill[0], &fleet.decode[0]);
        // Routed there, it may be held there.
        let predicted = prompt(1, HELD * BLOCK + 5);
        for _ in 0..3 {
            fleet.ask(Ask::new(&predicted)).await?.complete()?;
            assert_eq!(prefill.received().last().unwrap().claim(), None);
            assert_eq!(refusal(&trace), "nothing_cached");
        }
        let asked = Ask::new(&predicted).nvext("decode_worker_id", decode.id);
        let asked = asked
            .nvext("prefill_worker_id", prefill.id)
            .nvext("dp_rank", 0)
            .nvext("prefill_dp_rank", 0);
        let answer = fleet.ask(asked.query_only()).await?;
        assert_eq!(answer.status, 200, "{}", answer.body);
        let lines = trace.lines("effective cached blocks: ");
        let seen = lines
            .last()
            .context("no choice was logged")?
            .message()
            .to_owned();
        ensure!(
            !seen.contains("effective cached blocks: 0"),
            "nothing was predicted: {seen}"
        );
        // Part in device memory, more in the host's: the claim is of the former.
        let both = prompt(2, HELD * BLOCK);
        hold(decode, 0, &both[..4 * BLOCK])?;
        decode.store_on_host(0, &both, 4)?;
        // Only the host has this.
        let host = prompt(3, HELD * BLOCK);
        decode.store_on_host(0, &host, 0)?;
        // The events of a rank are read in order.
        let last = prompt(4, 2 * BLOCK);
        hold(decode, 0, &last)?;
        fleet.holds(0, decode, 0, &last, 2).await?;
        fleet.ask(Ask::new(&longer(&both, 1))).await?.complete()?;
        is_claim(prefill.received().last().unwrap(), decode, 0, 4)?;
        fleet.ask(Ask::new(&longer(&host, 1))).await?.complete()?;
        assert_eq!(prefill.received().last().unwrap().claim(), None);
        at_rest(&fleet).await
    })
}

#[test]
fn a_client_cannot_say_what_a_worker_holds() -> Result<()> {
    run(async |trace| {
        let scene = Scene::start(&trace, pair(Spec::cuts())?).await?;
        let (fleet, other) = (&scene.fleet, &scene.fleet.decode[1]);
        let forged = json!({
            "version": 1,
            "claim_id": "forged",
            "decode_worker_id": other.id,
            "decode_dp_rank": 0,
            "cached_prefix_blocks": 3,
            "block_size": BLOCK,
            "prefix_hash": 5,
        });
        let params = json!({"decode_cache_info": forged.clone()});
        let ways: [fn(Ask, Value, Value) -> Ask; 7] = [
            |ask, forged, _| ask.field("decode_cache_info", forged),
            |ask, forged, _| ask.nvext("decode_cache_info", forged),
            |ask, _, params| ask.field("extra_args", params),
            |ask, _, params| ask.nvext("extra_args", params),
            |ask, _, params| ask.field("kv_transfer_params", params),
            |ask, _, params| ask.nvext("router", params),
            |ask, forged, _| ask.header("x-dynamo-meta-decode_cache_info", forged),
        ];
        let mut served = 0;
        for asked in [longer(&scene.prefix, 1), prompt(7, 100)] {
            for way in ways {
                let ask = way(Ask::new(&asked), forged.clone(), params.clone());
                let answer = fleet.ask(ask).await?;
                served += usize::from(is_served(&answer)?);
            }
        }
        assert!(served >= 2, "hardly anything was tried");
        let all = fleet.prefill.iter().chain(&fleet.decode);
        for got in all.flat_map(|worker| worker.received()) {
            let sent = got.request.to_string();
            assert!(!sent.contains("forged"), "{sent}");
        }
        // The frontend's own claims are as ever.
        let claims = scene.prefill().received();
        assert_eq!(claims.len(), served);
        for got in claims.iter().filter(|got| got.claim().is_some()) {
            is_claim(got, scene.holder(), 0, HELD)?;
        }
        scene.at_rest().await
    })
}

/// Whether the frontend took it; what it does not know it may refuse as the client's fault.
fn is_served(answer: &Answer) -> Result<bool> {
    ensure!(
        answer.is_complete() || (400..500).contains(&answer.status),
        "{}: {}",
        answer.status,
        answer.body
    );
    Ok(answer.is_complete())
}
