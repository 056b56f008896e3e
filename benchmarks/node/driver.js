// node-redlock on one ioredis connection. A case per line of standard input, as JSON:
// {"tasks": 64, "names": 64, "count": 8, "body": 0}; its seconds on standard output, as JSON.
'use strict';

const readline = require('readline');
const Redis = require('ioredis');
const Redlock = require('redlock');

const url = process.argv[2];
const redis = new Redis(url.startsWith('unix://') ? url.slice(7).split('?')[0] : url);
// The defaults, but as patient as the other contenders: it waits for as long as it takes.
const redlock = new Redlock([redis], { retryCount: -1 });

const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, seconds * 1000));

async function work(name, count, body) {
  for (let i = 0; i < count; i++) {
    const lock = await redlock.lock(name, 30000);
    if (body) await pause(body);
    await lock.unlock();
  }
}

async function run({ tasks, names, count, body }) {
  const started = process.hrtime.bigint();
  const all = [];
  for (let i = 0; i < tasks; i++) all.push(work(`node-redlock:${i % names}`, count, body));
  await Promise.all(all);
  return Number(process.hrtime.bigint() - started) / 1e9;
}

(async () => {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    let answer;
    try {
      answer = { seconds: await run(JSON.parse(line)) };
    } catch (failed) {
      answer = { failed: failed.name };
    }
    process.stdout.write(JSON.stringify(answer) + '\n');
  }
  redis.disconnect();
})();
