//! Stores that cannot be reached, and versions that are not what was published.

use tierbed_core::ErrorKind;

use super::*;

fn failures(server: &Server, reason: &str) -> f64 {
    metric(server, &format!("tierbed_sync_failures_total{{reason=\"{reason}\"}}"))
}

fn flip(path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    let folder = FsFolder::open(path.parent().unwrap()).unwrap();
    folder.write_durable(path.file_name().unwrap().to_str().unwrap(), &bytes).unwrap();
}

#[test]
fn a_corrupted_part_keeps_the_old_answer_and_is_retried() {
    let mut trainer = Trainer::new();
    trainer.whole();
    let server = trainer.serve();
    trainer.holds = true;
    let damages: [fn(&Path); 2] = [flip, |path| std::fs::remove_file(path).unwrap()];
    for (make, damage) in [Trainer::delta, Trainer::whole].into_iter().zip(damages) {
        let (before, failed) = (answering(&server), failures(&server, "corruption"));
        let version = make(&mut trainer);
        let pages = trainer.store().join(format!("v/{version:06}/rows.pages"));
        let whole = std::fs::read(&pages).unwrap();
        damage(&pages);
        trainer.promote();
        until("a failure", || failures(&server, "corruption") >= failed + 2.0);
        assert_eq!(answering(&server), before);
        let told = health(&server);
        assert_eq!(
            (&told["status"], &told["reasons"][0]["kind"]),
            (&json!("degraded"), &json!("sync"))
        );
        let folder = FsFolder::open(pages.parent().unwrap()).unwrap();
        folder.write_durable("rows.pages", &whole).unwrap();
        until_answers(&server, version);
    }
}

#[test]
fn a_delta_of_another_parent_is_refused_and_the_next_version_served() {
    let mut trainer = Trainer::new();
    trainer.whole();
    let first = trainer.newest.clone().unwrap();
    trainer.delta();
    let server = trainer.serve();
    // What it says to be a delta on is not what it was made against.
    let other = trainer.write(None);
    let opened = FsFolder::open(&other).unwrap();
    let other = Snapshot::open(Arc::new(opened), &small()).unwrap();
    let folder = trainer.write(Some(&other));
    trainer.push(&folder, Some(&first.generation().identity));
    until("a refusal", || failures(&server, "invalid") >= 1.0);
    assert_eq!(answering(&server), 2);
    let version = trainer.whole();
    until_answers(&server, version);
}

#[test]
fn a_damaged_head_and_a_store_that_is_away_change_nothing() {
    let mut trainer = Trainer::new();
    trainer.whole();
    let server = trainer.serve();
    flip(&trainer.store().join("HEAD.stable.json"));
    until("a failure", || failures(&server, "corruption") >= 1.0);
    let away = trainer.folder.path().join("away");
    std::fs::rename(trainer.store(), &away).unwrap();
    until("another failure", || failures(&server, "invalid") >= 1.0);
    assert_eq!(answering(&server), 1);
    std::fs::rename(&away, trainer.store()).unwrap();
    trainer.roll_back(1);
    let version = trainer.delta();
    until_answers(&server, version);
    assert!(server.stop());
}

#[test]
fn a_server_starts_without_its_store_only_where_a_version_is_here() {
    let mut trainer = Trainer::new();
    let error = trainer.begin().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("remedy: see that the location can be reached"), "{error}");
    trainer.whole();
    trainer.delta();
    assert_eq!(trainer.begin().unwrap().version(), Seq(2));
    let away = trainer.folder.path().join("away");
    std::fs::rename(trainer.store(), &away).unwrap();
    let following = trainer.begin().unwrap();
    assert!(following.behind().is_some() && following.version() == Seq(2));
    let error = trainer.begin().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "another server: {error}");
    let server = Server::follow(&options(), following, None).unwrap();
    assert_eq!(answering(&server), 2);
    assert_eq!(health(&server)["status"], json!("degraded"));
    std::fs::rename(&away, trainer.store()).unwrap();
    let version = trainer.delta();
    until_answers(&server, version);
    assert!(server.stop());
}

#[test]
fn a_copy_that_rots_comes_again() {
    let mut trainer = Trainer::new();
    trainer.whole();
    trainer.delta();
    drop(trainer.begin().unwrap());
    for file in
        ["000002/rows.pages", "000001/rows.index", "000002/snapshot.json", "000001/parts.json"]
    {
        flip(&trainer.folder.path().join("here").join(file));
        let following = trainer.begin().unwrap();
        assert!(following.behind().is_none(), "{file}: {:?}", following.behind());
        assert_eq!(following.version(), Seq(2));
    }
}

#[test]
fn options_that_make_no_sense_are_refused() {
    let trainer = Trainer::new();
    let changes: [fn(&mut Follow); 4] = [
        |follow| follow.channel = "a/b".to_owned(),
        |follow| follow.swap_share = 0.0,
        |follow| follow.swap_share = 0.9,
        |follow| follow.poll = Duration::ZERO,
    ];
    for change in changes {
        let mut follow = trainer.follow();
        change(&mut follow);
        let error = Following::begin(follow, Opener::new(|_| Ok(small()))).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
    let parsed = Follow::parse("s3://models/ads@canary", "here".into()).unwrap();
    assert_eq!((&*parsed.location, &*parsed.channel), ("s3://models/ads", "canary"));
    assert_eq!(Follow::parse("models/ads", "here".into()).unwrap().channel, "stable");
}
