-- What aiodlock keeps in PostgreSQL: tables, and the functions that are the protocol.
--
-- Filled in before it runs: @unlogged@ (the word "unlogged", or nothing), @is_unlogged@, @version@, and @called@, which is
-- the language, the rights and the settings of the functions that clients call.
-- Every decision is made and written in one call of `turn`: short ways for the most common cases stand in front, and the general way
-- reads a name, passes its messages to the function of each verb, and writes the name. Calls about the same name wait for each other at
-- an advisory lock; the clock is read behind it. Deadlines are milliseconds of the server's clock, tokens microseconds.
-- A key is the prefix, the kind ("l", "s" or "o") and the percent-encoded name, with colons between them.
--
-- A name has one row, and after 32 updates that row gets another `version`: the newest is sought in the index. Beside a
-- transaction that stays open, what an update leaves cannot be removed, and a look-up without the version would walk
-- through all of it. So would a plan that collects the rows of a name and sorts them, and the server prefers that to the
-- index for a table of few live rows: the functions set enable_sort = off.

-- Another role may have made it, if that which installs must not.
do $$ begin
  if to_regnamespace('aiodlock') is null then
    create schema aiodlock;
  end if;
end $$;

-- hold_until: until then the name stays closed if the body began. rest: the request has left, and keeps the name closed
-- for so long after `deadline`; 0 while it is here. note, description: for people. lingers: 1 if its client may keep the
-- lease when its body has ended, 2 once it was recalled, since others want the name; else 0.
create type aiodlock.holder as (
  id text, mode text, token bigint, deadline bigint, length bigint, delay bigint, owner text, client text,
  hold bigint, hold_until bigint, began boolean, rest bigint, note text, description text, lingers smallint
);

-- writes: how often this version was updated. head: the arrival of the first waiter, 0 if nobody waits; its deadline
-- and length are those in the waiter's row. marked_until: until then there may be markers of requests for this name.
-- recorded_until: until then a success is on record. places: of a semaphore, how many may hold; resized: whether others
-- follow that. keep_until: from then on the row of a free name may be deleted.
-- lone: the short ways may be taken. Empty: nobody holds or waits, and nothing is remembered. A request's id: it alone
-- holds, by the last token, with neither lock-delay nor hold, and does not linger if others wait; `holders` is empty then, `lone_until` is
-- its deadline, `lone_length` the length of its lease, and `lone_words` its client and the message that acquired, or as
-- much of it as `holders_of` reads. Null: `holders` tells. noted: of unlogged tables, the longest lease that `meta` knows of through this name.
create @unlogged@ table aiodlock.name (
  key text collate "C" not null,
  version bigint not null,
  writes integer not null,
  token bigint not null,
  keep_until bigint not null,
  head bigint not null,
  head_deadline bigint not null,
  head_length bigint not null,
  marked_until bigint not null,
  recorded_until bigint not null,
  places bigint not null,
  resized boolean not null,
  holders aiodlock.holder[] not null,
  lone text collate "C",
  lone_until bigint not null,
  lone_length bigint not null,
  lone_words text not null,
  noted bigint not null,
  primary key (key, version)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0);

create @unlogged@ table aiodlock.waiter (
  key text collate "C" not null,
  arrival bigint not null,
  id text collate "C" not null unique,
  mode text not null,
  owner text not null,
  delay bigint not null,
  client text not null,
  deadline bigint not null,
  length bigint not null,
  since bigint not null,
  hold bigint not null,
  note text not null,
  description text not null,
  lingers boolean not null,
  primary key (key, arrival)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0);

-- Requests that were left although a duplicate of their acquire may still arrive, and requests whose lease an
-- operator broke.
create @unlogged@ table aiodlock.marker (id text collate "C" primary key, keep_until bigint not null);
create @unlogged@ table aiodlock.broken (id text collate "C" primary key, keep_until bigint not null);

-- The results of what is to be done once.
create @unlogged@ table aiodlock.record (
  key text collate "C" primary key, id text not null, result text not null, keep_until bigint not null,
  recorded_at bigint not null default 0
);

-- What clients tell of their waits, so that others find deadlocks. client: the prefix and the client's label. A crash of the
-- server may lose it: clients tell it again. The rows are few, each is written every two seconds.
create unlogged table aiodlock.wait (
  client text collate "C" primary key, serial bigint not null, record bytea not null, keep_until bigint not null
);

-- One row: what was installed. longest: the longest that any lease, with its lock-delay, may have been (ms).
create table aiodlock.meta (
  version integer not null, durability text not null, longest bigint not null
);
alter table aiodlock.meta replica identity full;  -- else a publication of all tables refuses updates
insert into aiodlock.meta values (
  @version@, case when @is_unlogged@ then 'unlogged' else 'logged' end, 0
);

-- Which history this is. A row for each timeline on which a client has called, with a random id: two standbys that were
-- promoted apart from each other write on timelines of the same number. born_us: when that was, on the server's clock.
create table aiodlock.history (timeline integer primary key, id text not null, born_us bigint not null);

-- One row, which is gone when the tables are: after a crash of the server, unlogged ones are empty. Nothing is granted
-- before `opened_at` then, because somebody may still believe in a lease that was lost with them.
create @unlogged@ table aiodlock.present (opened_at bigint not null);
insert into aiodlock.present values (0);

-- FUNCTIONS: an upgrade runs what follows.

drop type if exists aiodlock.situation;

-- Which versions of clients may work here, the oldest and the newest. Every version of the schema, also a later one, has
-- this function with this name and this result; all else may change.
create function aiodlock.versions(out oldest integer, out newest integer) language sql stable security definer
set search_path = pg_catalog, pg_temp as $$ select m.version, m.version from aiodlock.meta m $$;

-- The timeline of the log that is being written; null on a standby. A checkpoint's timeline may lag by minutes.
create function aiodlock.timeline() returns text language sql stable as
$$ select case when not pg_is_in_recovery() then left(pg_walfile_name(pg_current_wal_lsn()), 8) end $$;

-- Clients of this version may call. Asked in each call, with the history: see `store.py`.
create function aiodlock.version() returns integer language sql immutable as $$ select @version@ $$;

-- Whether commits wait for a standby. What makes somebody a holder, or tells a record, has to wait for what it has read,
-- too: a commit whose wait was ended, by an operator or by a crash, is visible here, and perhaps nowhere else. What waits
-- for a message of its own in the log waits for all that stands before it.
create function aiodlock.wait_for_standby() returns void language plpgsql as $$
begin
  if current_setting('synchronous_standby_names') <> '' then
    perform pg_logical_emit_message(true, 'aiodlock', '');
  end if;
end $$;

-- The server's clock in microseconds. Tests replace this function.
create function aiodlock.clock_us() returns bigint language sql volatile as
$$ select (extract(epoch from clock_timestamp()) * 1000000)::bigint $$;

-- Not by md5(), which a server that keeps to FIPS 140 refuses.
create function aiodlock.channel(client text) returns text language sql stable as
$$ select 'aiodlock_' || left(encode(sha256(convert_to(client, 'UTF8')), 'hex'), 40) $$;

-- Notify a client, unless nearly no room is left for notifications. Where there is none, the server refuses the whole
-- transaction. Each notification is a hint: the client's next extension has the same answer.
create function aiodlock.tell(client text, message text) returns void language sql volatile as
$$ select case when pg_notification_queue_usage() < 0.9 then pg_notify(aiodlock.channel(client), message) end $$;

-- When a holder stops blocking others, if it is never heard of again.
create function aiodlock.closed_until(h aiodlock.holder) returns bigint language sql immutable as
$$ select case when h.rest > 0 then h.deadline + h.rest
   else greatest(h.deadline + h.delay, case when h.began then h.hold_until end) end $$;

-- A record whose deadlines lie within its lengths, though the clock was set back.
create function aiodlock.clamped(h aiodlock.holder, now_ms bigint) returns aiodlock.holder language plpgsql immutable as $$
begin
  h.deadline := least(h.deadline, now_ms + h.length);
  h.hold_until := least(h.hold_until, now_ms + h.hold);
  return h;
end $$;

-- Who holds a name.
create function aiodlock.holders_of(n aiodlock.name) returns aiodlock.holder[] language plpgsql immutable as $$
declare
  f text[];
begin
  if n.lone is null or n.lone = '' then
    return n.holders;
  end if;
  f := string_to_array(n.lone_words, E'\t');  -- the client, then the message
  return array[row(
    n.lone, f[5], n.token, n.lone_until, n.lone_length, 0, f[6], f[1], 0, 0, false, 0, coalesce(f[11], ''),
    coalesce(f[12], ''), case when f[14] = 'linger' then 1 else 0 end
  )::aiodlock.holder];
end $$;

-- What `holders_of` reads of a lone holder. Not by `concat_ws`, which is not immutable: then this would not be inlined, but
-- planned at each call.
create function aiodlock.lone_words(h aiodlock.holder) returns text language sql immutable as $$
  select coalesce(
    h.client || E'\t\t\t\t' || h.mode || E'\t' || h.owner || E'\t\t\t\t\t' || h.note || E'\t' || h.description, ''
  )
$$;

-- x excludes all, s excludes x, s3 is one of at most so many as the semaphore has places.
create function aiodlock.fits(mode text, holders aiodlock.holder[], places bigint) returns boolean
language plpgsql immutable as $$
declare
  h aiodlock.holder;
begin
  if cardinality(holders) = 0 then
    return true;
  end if;
  if mode = 'x' or (length(mode) > 1 and cardinality(holders) >= places) then
    return false;
  end if;
  foreach h in array holders loop
    if h.mode = 'x' then
      return false;
    end if;
  end loop;
  return true;
end $$;

-- The token of what an owner holds by live records, negative if none of them is exclusive; null if it holds nothing.
create function aiodlock.token_of(who text, holders aiodlock.holder[], now_ms bigint) returns bigint
language plpgsql immutable as $$
declare
  h aiodlock.holder;
  found_token bigint;
begin
  foreach h in array holders loop
    if h.owner = who and now_ms < h.deadline then
      if h.mode = 'x' then
        return h.token;
      end if;
      found_token := -h.token;
    end if;
  end loop;
  return found_token;
end $$;

create function aiodlock.earliest_end(holders aiodlock.holder[]) returns bigint
language plpgsql immutable as $$
declare
  h aiodlock.holder;
  earliest bigint;
begin
  foreach h in array holders loop
    earliest := least(earliest, aiodlock.closed_until(h));
  end loop;
  return earliest;
end $$;

-- With another level the statements of a function do not see what was committed while it waited for a lock.
create function aiodlock.check_isolation() returns void language plpgsql as $$
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    raise exception 'aiodlock needs the isolation level "read committed", and this session has "%"',
      current_setting('transaction_isolation') using errcode = '25001',
      hint = 'ALTER ROLE the_role SET default_transaction_isolation = ''read committed''';
  end if;
end $$;

-- Of unlogged tables: keep the longest that any lease, with its lock-delay, may be (ms), and a day at the most: else one
-- lease of a year would close all names for a year after a crash. Returns the longest so far.
create function aiodlock.note_length(wished bigint) returns bigint language plpgsql as $$
declare
  known bigint;
  asked bigint := least(wished, 86400000);
begin
  select m.longest into known from aiodlock.meta m;
  if known < asked then
    update aiodlock.meta m set longest = asked where m.longest < asked;
  end if;
  return greatest(known, wished);
end $$;

-- Of unlogged tables: the time from which on grants are made. Since a crash it is as far away as the longest lease at
-- the most: if it is further, the clock was set back.
create function aiodlock.opened(now_ms bigint) returns bigint language plpgsql as $$
declare
  at_ms bigint;
begin
  select p.opened_at into at_ms from aiodlock.present p;
  if at_ms is null then
    -- A pooler may have kept this client's connection, so it did not say hello after the crash.
    perform aiodlock.hello();
    select p.opened_at into at_ms from aiodlock.present p;
  end if;
  if now_ms < at_ms then
    update aiodlock.present p set opened_at = now_ms + least(m.longest, 86400000)
      from aiodlock.meta m where p.opened_at > now_ms + least(m.longest, 86400000);
    select p.opened_at into at_ms from aiodlock.present p;
  end if;
  return at_ms;
end $$;

-- A name while messages about it are carried out: its row, as it was read and as it will be written, and what is known of
-- the call and of the present message.
--   holders        all of them, also a lone one
--   result         what is on record until `recorded_until`
--   row_at         null: there is no row
--   changed        the row has to be written
--   durable        what was written must survive a crash before anybody is told
--   heard          what the caller is notified of; each begins with a new line
-- and of the message:
--   mine           the record of its request, if that holds
--   freed          the head may get in now, or is another one
--   moved          the head is a new one, or its blocker ends sooner
create type aiodlock.situation as (
  caller text, retention bigint, now_us bigint, now_ms bigint, durable boolean, heard text,
  key text, row_at tid, token bigint, keep_until bigint, head bigint, head_deadline bigint, head_length bigint,
  marked_until bigint, recorded_until bigint, places bigint, resized boolean, holders aiodlock.holder[], noted bigint,
  result text, changed boolean, mine aiodlock.holder, freed boolean, moved boolean, answer text
);

-- Notify a client of something: if it is the caller, behind the answers. Returns what the caller hears.
create function aiodlock.say(heard text, caller text, client text, message text) returns text
language plpgsql volatile as $$
declare
  done boolean;
begin
  if client = caller then
    return coalesce(heard, '') || E'\n' || message;
  elsif starts_with(message, 'granted ') and current_setting('synchronous_standby_names') <> '' then
    -- The grant may be visible and not at the standby yet: the waiter asks, and the answer waits for the standby.
    message := 'look ' || substr(message, 9);
  end if;
  done := aiodlock.tell(client, message) is null;  -- PERFORM would run a query
  return heard;
end $$;

-- The situation of another name.
create function aiodlock.read_name(s aiodlock.situation, k text) returns aiodlock.situation language plpgsql as $$
begin
  select n.ctid, n.token, n.keep_until, n.head, n.head_deadline, n.head_length, n.marked_until, n.recorded_until, n.places,
      n.resized, case when n.lone > '' then aiodlock.holders_of(n) else n.holders end, n.noted
    into s.row_at, s.token, s.keep_until, s.head, s.head_deadline, s.head_length, s.marked_until, s.recorded_until,
      s.places, s.resized, s.holders, s.noted
    from aiodlock.name n where n.key = k order by n.version desc limit 1;
  if s.row_at is null then
    s := row(
      s.caller, s.retention, s.now_us, s.now_ms, s.durable, s.heard, k, null, 0, 0, 0, 0, 0, 0, 0, 0, false, '{}', 0, null,
      false, null, false, false, null
    );
    return s;
  end if;
  s.key := k;
  s.changed := false;
  if s.recorded_until > 0 then
    -- A sweep may have deleted it, by a later clock.
    select r.result into s.result from aiodlock.record r where r.key = k;
    if not found or s.now_ms >= s.recorded_until then
      s.recorded_until := 0;  -- or it would come back when the clock is set back
      s.changed := true;
    end if;
  end if;
  return s;
end $$;

-- Write the name's row. It outlives its holding, and the last token by `retention`.
create function aiodlock.write_name(s aiodlock.situation) returns void language plpgsql as $$
declare
  h aiodlock.holder;
  alone text;                    -- as the column `lone`
begin
  -- Where nobody holds, nobody waits either.
  if cardinality(s.holders) < 2 and s.now_ms >= s.marked_until and s.recorded_until = 0 then
    h := s.holders[1];
    alone := case when h.id is null then ''
             when length(h.mode) = 1 and h.token = s.token and h.delay = 0 and h.hold = 0 and h.rest = 0 and h.lingers = 0
             then h.id end;
    if alone > '' then
      s.holders := '{}';
    end if;
  end if;
  if s.row_at is null then
    insert into aiodlock.name values (
      s.key, 1, 0, s.token, s.keep_until, s.head, s.head_deadline, s.head_length, s.marked_until, s.recorded_until,
      s.places, s.resized, s.holders, alone, coalesce(h.deadline, 0), coalesce(h.length, 0), aiodlock.lone_words(h), s.noted
    );
  else
    -- Beside a transaction that stays open, no old row can be removed, and a look-up walks through those of the same
    -- version. So there are few of them.
    update aiodlock.name n set
        token = s.token, keep_until = s.keep_until, head = s.head, head_deadline = s.head_deadline,
        head_length = s.head_length, marked_until = s.marked_until, recorded_until = s.recorded_until,
        places = s.places, resized = s.resized, holders = s.holders, lone = alone,
        lone_until = coalesce(h.deadline, 0), lone_length = coalesce(h.length, 0), lone_words = aiodlock.lone_words(h),
        noted = s.noted, writes = (n.writes + 1) % 32, version = n.version + (n.writes + 1) / 32
      where n.ctid = s.row_at;
  end if;
end $$;

-- Find the record of a request. Then clamp the records if the clock was set back, and drop those that have ended. Both
-- are rare.
create function aiodlock.settle(s aiodlock.situation, rid text) returns aiodlock.situation language plpgsql as $$
declare
  h aiodlock.holder;
  stale boolean := false;
  kept aiodlock.holder[] := '{}';
begin
  s.freed := false;
  s.mine := null;
  foreach h in array s.holders loop
    stale := stale or h.deadline > s.now_ms + h.length or h.hold_until > s.now_ms + h.hold
      or s.now_ms >= aiodlock.closed_until(h);
    if h.id = rid then
      s.mine := aiodlock.clamped(h, s.now_ms);
    end if;
  end loop;
  if stale then
    foreach h in array s.holders loop
      h := aiodlock.clamped(h, s.now_ms);
      if s.now_ms < aiodlock.closed_until(h) then
        kept := kept || h;
      else
        s.freed := true;
      end if;
    end loop;
    s.holders := kept;
    s.changed := true;
  end if;
  return s;
end $$;

-- Grant from the head on, as far as the holders allow. Nobody passes the one that stays. As long as no holder is gone and
-- the head is not overdue, there is nothing to grant.
create function aiodlock.grant_queue(s aiodlock.situation, rid text) returns aiodlock.situation language plpgsql as $$
declare
  holding aiodlock.holder[] := s.holders;
  head aiodlock.waiter;
  taken boolean;                 -- the head was removed from the queue
  held bigint;
  h aiodlock.holder;
  late text[];                   -- granted and lingering: to be told when it is known whether somebody still waits
begin
  if not s.freed and s.now_ms < s.head_deadline and s.head_deadline <= s.now_ms + s.head_length then
    return s;
  end if;
  loop
    taken := cardinality(holding) = 0;  -- then any head fits
    if taken then
      delete from aiodlock.waiter w where w.ctid = (
        select l.ctid from aiodlock.waiter l where l.key = s.key and l.arrival >= s.head order by l.arrival limit 1
      ) returning w.* into head;
    else
      select * into head from aiodlock.waiter w where w.key = s.key and w.arrival >= s.head order by w.arrival limit 1;
    end if;
    exit when head.id is null;
    if head.deadline > s.now_ms + head.length then
      -- The clock was set back. All at once: many dead waiters cost together what one costs.
      update aiodlock.waiter w set deadline = s.now_ms + w.length
        where w.key = s.key and w.deadline > s.now_ms + w.length;
      head.deadline := s.now_ms + head.length;
    end if;
    if s.now_ms < head.deadline then
      held := case when cardinality(holding) > 1 or (holding[1]).owner = head.owner
              then aiodlock.token_of(head.owner, holding, s.now_ms) end;
      if held > 0 or (held < 0 and head.mode <> 'x') then
        held := abs(held);
      elsif taken or (head.mode <> 'x' and aiodlock.fits(head.mode, holding, s.places)) then
        held := greatest(s.token + 1, s.now_us);
        s.token := held;
        s.keep_until := greatest(s.keep_until, held / 1000 + 1 + s.retention);
      else
        exit;
      end if;
      h := aiodlock.granted_waiter(head, held, s.now_ms);
      holding := holding || h;
      s.keep_until := greatest(s.keep_until, h.deadline + h.delay, h.hold_until);
      s.durable := true;
      if h.id = rid then
        s.mine := h;
      end if;
      if head.lingers then
        late := late || h.id;
      else
        s.heard := aiodlock.say(s.heard, s.caller, h.client, concat_ws(' ', 'granted', h.id, s.key, held));
      end if;
    end if;
    if not taken then
      delete from aiodlock.waiter w where w.id = head.id;
    end if;
    s.head := head.arrival + 1;
    s.moved := true;
  end loop;
  s.head := coalesce(head.arrival, 0);
  s.head_deadline := coalesce(head.deadline, 0);
  s.head_length := coalesce(head.length, 0);
  s.holders := holding;
  s.changed := true;
  s.freed := false;
  return case when late is null then s else aiodlock.tell_lingering(s, rid, late) end;
end $$;

-- A holder that was a waiter. It keeps the deadline it had: a ghost that is granted costs no more than one that waits.
create function aiodlock.granted_waiter(w aiodlock.waiter, token bigint, now_ms bigint) returns aiodlock.holder
language plpgsql immutable as $$
begin
  return row(
    w.id, w.mode, token, w.deadline, w.length, w.delay, w.owner, w.client, w.hold, now_ms + w.hold, false, 0, w.note,
    w.description, w.lingers::integer
  )::aiodlock.holder;
end $$;

-- Tell those that linger of their grants. While anybody waits, each holder that lingers is recalled.
create function aiodlock.tell_lingering(s aiodlock.situation, rid text, granted text[]) returns aiodlock.situation
language plpgsql as $$
declare
  holding aiodlock.holder[] := s.holders;
  h aiodlock.holder;
begin
  for place in 1 .. cardinality(holding) loop
    h := holding[place];
    if h.id = any (granted) then
      if s.head > 0 then
        h.lingers := 2;
        holding[place] := h;
      end if;
      if h.id = rid then
        s.mine := h;
      end if;
      s.heard := aiodlock.say(s.heard, s.caller, h.client,
        concat_ws(' ', 'granted', h.id, s.key, h.token || case when s.head > 0 then 'r' else '' end));
    end if;
  end loop;
  s.holders := holding;
  return s;
end $$;

-- What has changed of the request's own record: it lingers although others wait, or its body begins.
create function aiodlock.touch_mine(s aiodlock.situation, begins boolean) returns aiodlock.situation language plpgsql as $$
declare
  mine aiodlock.holder := s.mine;
begin
  if mine.lingers = 1 and s.head > 0 then
    mine.lingers := 2;  -- it has got in past those who wait, as its owner holds
  end if;
  if begins and not mine.began and s.now_ms < mine.deadline then
    mine.began := true;
    s.changed := true;
  end if;
  if mine is distinct from s.mine then
    for place in 1 .. cardinality(s.holders) loop
      if (s.holders[place]).id = mine.id then
        s.holders[place] := mine;
      end if;
    end loop;
    s.mine := mine;
  end if;
  return s;
end $$;

-- What a waiter is answered.
create function aiodlock.waiting_answer(s aiodlock.situation, left_ms bigint, arrival bigint) returns text
language plpgsql immutable as $$
begin
  return 'waiting ' || left_ms || ' ' || case when arrival = s.head
    then greatest(0, coalesce(aiodlock.earliest_end(s.holders), s.now_ms) - s.now_ms) else -1 end
    || ' ' || greatest(s.token, s.now_us);
end $$;

-- Extend the first of these messages, as long as they are about this name and each is of a live holder. Their answers are in
-- `answer`, a line each; null: there is none. Where many hold they extend together: to walk through all of them for each
-- one would take too long.
create function aiodlock.extend_holders(s aiodlock.situation, ops text[]) returns aiodlock.situation language plpgsql as $$
declare
  holding aiodlock.holder[] := s.holders;
  ids text[] := case when cardinality(holding) = 1 then array[(holding[1]).id]
                else array(select u.id from unnest(holding) with ordinality u order by u.ordinality) end;
  op text;
  f text[];
  seat integer;
  mine aiodlock.holder;
begin
  foreach op in array ops loop
    f := string_to_array(op, E'\t');
    seat := array_position(ids, f[3]);
    exit when f[1] <> 'extend' or f[2] <> s.key or seat is null;
    mine := aiodlock.clamped(holding[seat], s.now_ms);
    exit when s.now_ms >= mine.deadline;
    -- Not shorter than what was promised before: else the clamp would bring the deadline nearer.
    mine.deadline := greatest(mine.deadline, s.now_ms + f[4]::bigint);
    mine.length := greatest(f[4]::bigint, mine.deadline - s.now_ms);
    mine.began := mine.began or f[5] is not null;
    holding[seat] := mine;
    if @is_unlogged@ and mine.length + mine.delay > s.noted then
      perform aiodlock.note_length(mine.length + mine.delay);
      s.noted := mine.length + mine.delay;
    end if;
    s.keep_until := greatest(s.keep_until, aiodlock.closed_until(mine));
    s.changed := true;
    s.durable := true;
    s.answer := concat_ws(E'\n', s.answer,
      case when mine.lingers = 2 then 'recalled ' else 'held ' end || mine.token || ' ' || mine.deadline - s.now_ms);
  end loop;
  s.holders := holding;
  return s;
end $$;

-- Extend a request that does not hold, or no more.
create function aiodlock.extend(s aiodlock.situation, f text[]) returns aiodlock.situation language plpgsql as $$
declare
  rid text := f[3];
  wished bigint := f[4]::bigint;
  own aiodlock.waiter;           -- the request, if it waits
  held bigint;
begin
  s := aiodlock.settle(s, rid);
  s.durable := true;
  if s.head > 0 then
    select * into own from aiodlock.waiter w where w.id = rid and w.key = s.key;
  end if;
  if own.id is not null then
    own.deadline := least(own.deadline, s.now_ms + own.length);
    if s.now_ms < own.deadline then
      own.deadline := greatest(own.deadline, s.now_ms + wished);
      own.length := greatest(wished, own.deadline - s.now_ms);
      update aiodlock.waiter w set deadline = own.deadline, length = own.length where w.id = rid;
      if own.arrival = s.head then
        -- Or it would not be noticed that the clock was set back by less than this.
        s.head_deadline := own.deadline;
        s.head_length := own.length;
        s.changed := true;
      end if;
    else
      -- Too late, and maybe at the head: then the next one has to be told, nobody else will.
      delete from aiodlock.waiter w where w.id = rid;
      s.moved := own.arrival = s.head;
      s.freed := s.freed or s.moved;
      own := null;
    end if;
  end if;
  loop
    if s.head > 0 then
      s := aiodlock.grant_queue(s, rid);
      if s.now_ms < (s.mine).deadline then
        own := null;
      end if;
    end if;
    -- A waiter whose named owner came to hold meanwhile gets in, wherever it stands.
    exit when own.id is null or left(own.owner, 1) <> 'u' or cardinality(s.holders) = 0;
    held := aiodlock.token_of(own.owner, s.holders, s.now_ms);
    exit when held is null or (held < 0 and own.mode = 'x');
    s.moved := s.moved or own.deadline + own.delay < aiodlock.earliest_end(s.holders);
    s.mine := aiodlock.granted_waiter(own, abs(held), s.now_ms);
    s.holders := s.holders || s.mine;
    s.keep_until := greatest(s.keep_until, (s.mine).deadline + (s.mine).delay, (s.mine).hold_until);
    s.changed := true;
    s.freed := true;
    delete from aiodlock.waiter w where w.id = rid;
    own := null;
  end loop;
  if s.now_ms < (s.mine).deadline then
    s := aiodlock.touch_mine(s, f[5] is not null);
    s.answer := case when (s.mine).lingers = 2 then 'recalled ' else 'held ' end || (s.mine).token || ' '
                || (s.mine).deadline - s.now_ms;
  elsif own.id is not null then
    s.answer := aiodlock.waiting_answer(s, own.deadline - s.now_ms, own.arrival);
  else
    s.answer := aiodlock.or_broken(rid, s.now_ms, case when (s.mine).id is not null then 'gone expired'
                when cardinality(s.holders) > 0 then 'gone taken_over' else 'gone gone' end);
  end if;
  return s;
end $$;

-- An operator may have broken the lease.
create function aiodlock.or_broken(rid text, now_ms bigint, answer text) returns text language plpgsql stable as $$
begin
  if exists (select from aiodlock.broken b where b.id = rid and now_ms < b.keep_until) then
    return 'gone broken';
  end if;
  return answer;
end $$;

-- Of unlogged tables: keep the longest lease, and see whether names are still closed after a crash.
create function aiodlock.note_acquire(s aiodlock.situation, asked bigint) returns aiodlock.situation language plpgsql as $$
declare
  opened_at bigint;
begin
  if asked > s.noted then
    perform aiodlock.note_length(asked);
  end if;
  if s.noted = 0 then
    -- No request for the name has passed here since the tables were last emptied. A row alone says nothing: a leave with
    -- a marker, a break and a forget make one too.
    opened_at := aiodlock.opened(s.now_ms);
    if s.now_ms < opened_at then
      s.answer := 'closed ' || opened_at - s.now_ms;
      s.durable := true;  -- the longest lease, too: later requests find it noted
      return s;
    end if;
  end if;
  if asked > s.noted then
    s.noted := asked;
    s.changed := true;
  end if;
  return s;
end $$;

-- How many may hold. The first request says how many places a semaphore has. Others have to say the same, or to follow.
create function aiodlock.count_places(s aiodlock.situation, f text[]) returns aiodlock.situation language plpgsql as $$
declare
  asked bigint := substr(f[4], 2)::bigint;
  resizes boolean := coalesce(right(f[13], 6) = 'resize', false);
begin
  if (s.mine).id is not null and s.now_ms < aiodlock.closed_until(s.mine) then
    return s;
  elsif s.head > 0 and exists (
    select from aiodlock.waiter w where w.id = f[3] and w.key = s.key and s.now_ms < w.deadline) then
    return s;
  elsif resizes or (cardinality(s.holders) = 0 and s.head = 0) then
    s.places := asked;
    s.resized := resizes;
    s.changed := true;
    s.freed := true;
    if s.head > 0 then
      return aiodlock.grant_queue(s, f[3]);
    end if;
  elsif asked <> s.places and not s.resized then
    s.answer := 'limit s' || s.places;
  end if;
  return s;
end $$;

-- Each holder that lingers is told, once, that others want the name. Also one that is overdue: if the clock is set back, it
-- may be live again.
create function aiodlock.recall_holders(s aiodlock.situation) returns aiodlock.situation language plpgsql as $$
declare
  holding aiodlock.holder[] := s.holders;
  h aiodlock.holder;
  recalled boolean := false;
begin
  for place in 1 .. cardinality(holding) loop
    h := holding[place];
    if h.lingers = 1 then
      h.lingers := 2;
      holding[place] := h;
      recalled := true;
      s.heard := aiodlock.say(s.heard, s.caller, h.client, 'recall ' || h.id || ' ' || s.key);
    end if;
  end loop;
  if recalled then
    s.holders := holding;
    s.changed := true;
  end if;
  return s;
end $$;

-- Queue a request, or find it in the queue, and answer it.
create function aiodlock.enqueue(s aiodlock.situation, f text[]) returns aiodlock.situation language plpgsql as $$
declare
  own aiodlock.waiter;
begin
  -- The arrival is the time, or more if the clock was set back. So no number is used twice.
  loop
    insert into aiodlock.waiter as w
      select s.key, coalesce(max(l.arrival) + 1, s.now_us), f[3], f[4], f[5], f[8]::bigint, s.caller,
          s.now_ms + f[7]::bigint, f[7]::bigint, s.now_ms, coalesce(f[12]::bigint, 0), coalesce(f[10], ''),
          coalesce(f[11], ''), coalesce(f[13] = 'linger', false)
        from aiodlock.waiter l where l.key = s.key and l.arrival >= s.now_us
      on conflict (id) do nothing returning w.* into own;
    exit when own.id is not null;
    -- The message was repeated. The request keeps its place, unless it is overdue.
    select * into own from aiodlock.waiter w where w.id = f[3] and w.key = s.key and s.now_ms < w.deadline;
    exit when own.id is not null;
    delete from aiodlock.waiter w where w.id = f[3];
  end loop;
  if s.head = 0 then
    s.head := own.arrival;
    s.head_deadline := own.deadline;
    s.head_length := own.length;
    s.changed := true;
  end if;
  s.answer := aiodlock.waiting_answer(s, least(own.deadline - s.now_ms, own.length), own.arrival);
  return s;
end $$;

create function aiodlock.acquire(s aiodlock.situation, f text[]) returns aiodlock.situation language plpgsql as $$
declare
  rid text := f[3];
  mode text := f[4];
  length_ms bigint := f[6]::bigint;
  hold bigint := coalesce(f[12]::bigint, 0);
  begins boolean := coalesce(left(f[13], 6) = 'begins', false);
  own aiodlock.waiter;           -- the request, if it waits
  held bigint;
begin
  if s.now_ms < s.marked_until
    and exists (select from aiodlock.marker m where m.id = rid and s.now_ms < m.keep_until) then
    s.answer := 'gone gone';
    return s;
  end if;
  if @is_unlogged@ then
    s := aiodlock.note_acquire(s, greatest(length_ms + f[8]::bigint, hold));
    if s.answer is not null then
      return s;
    end if;
  end if;
  s := aiodlock.settle(s, rid);
  s.durable := true;
  if s.head > 0 then
    s := aiodlock.grant_queue(s, rid);
  end if;
  if length(mode) > 1 then
    s := aiodlock.count_places(s, f);
  end if;
  if (s.mine).id is not null then
    s := aiodlock.touch_mine(s, begins);
    if s.now_ms < (s.mine).deadline then
      s.answer := case when (s.mine).lingers = 2 then 'recalled ' else 'granted ' end || (s.mine).token || ' '
                  || (s.mine).deadline - s.now_ms;
      return s;
    elsif s.now_ms < aiodlock.closed_until(s.mine) then
      s.answer := 'gone gone';
      return s;
    end if;
  end if;

  held := case when cardinality(s.holders) > 1 or (s.holders[1]).owner = f[5]
          then aiodlock.token_of(f[5], s.holders, s.now_ms) end;
  if s.head > 0 and (held is not null or f[9] = 'nowait') then
    select * into own from aiodlock.waiter w where w.id = rid and w.key = s.key and s.now_ms < w.deadline;
    if own.id is null then
      -- Overdue: it must not come back with the clock, beside what this message makes of the request.
      delete from aiodlock.waiter w where w.id = rid;
    end if;
  end if;
  if own.id is not null then
    return aiodlock.enqueue(s, f);
  elsif s.answer is not null then
    return s;
  elsif held < 0 and mode = 'x' then
    s.answer := 'deadlock';
  elsif held is not null
    or (s.head = 0 and (cardinality(s.holders) = 0 or (mode <> 'x' and aiodlock.fits(mode, s.holders, s.places)))) then
    s.mine := row(
      rid, mode, abs(held), s.now_ms + length_ms, length_ms, f[8]::bigint, f[5], s.caller, hold, s.now_ms + hold, begins,
      0, coalesce(f[10], ''), coalesce(f[11], ''),
      case when f[13] = 'linger' then case when s.head > 0 then 2 else 1 end else 0 end
    );
    if held is null then
      s.token := greatest(s.token + 1, s.now_us);
      s.mine.token := s.token;
      s.keep_until := greatest(s.keep_until, s.token / 1000 + 1 + s.retention);
    else
      s.moved := s.moved or aiodlock.closed_until(s.mine) < aiodlock.earliest_end(s.holders);
    end if;
    s.holders := s.holders || s.mine;
    s.keep_until := greatest(s.keep_until, (s.mine).deadline + (s.mine).delay, (s.mine).hold_until);
    s.changed := true;
    s.answer := case when (s.mine).lingers = 2 then 'recalled ' else 'granted ' end || (s.mine).token || ' ' || length_ms;
  else
    s := aiodlock.recall_holders(s);
    if f[9] = 'nowait' then
      s.answer := 'busy';
    else
      s := aiodlock.enqueue(s, f);
    end if;
  end if;
  return s;
end $$;

-- Keep the result of what is to be done once, and tell all who wait.
create function aiodlock.record_result(s aiodlock.situation, f text[]) returns aiodlock.situation language plpgsql as $$
declare
  client text;
  ids text;
begin
  s.recorded_until := s.now_ms + f[6]::bigint;
  s.result := f[7];
  s.keep_until := greatest(s.keep_until, s.recorded_until);
  insert into aiodlock.record values (s.key, f[3], f[7], s.recorded_until, s.now_ms)
    on conflict (key) do update
    set id = excluded.id, result = excluded.result, keep_until = excluded.keep_until, recorded_at = excluded.recorded_at;
  for client, ids in
    with waiting as (
      delete from aiodlock.waiter w where w.key = s.key and w.arrival >= s.head returning w.client, w.id, w.arrival
    )
    select w.client, string_agg(w.id, ',' order by w.arrival) from waiting w group by w.client order by min(w.arrival)
  loop
    -- A notification has less than 8000 bytes. Ids and names in keys are ASCII.
    s.heard := aiodlock.say(s.heard, s.caller, client,
      'done ' || case when length(ids) + length(s.key) < 7900 then ids else '*' end || ' ' || s.key);
  end loop;
  s.holders := '{}';
  s.head := 0;
  s.head_deadline := 0;
  s.head_length := 0;
  s.changed := true;
  s.durable := true;
  s.answer := 'recorded';
  return s;
end $$;

-- What a leave makes of the request's record, if that holds: nothing, or what still keeps the name closed. Sets no answer if
-- the lease was lost, here or for its holder: within the lock-delay leaving does not open the name early.
create function aiodlock.end_mine(s aiodlock.situation, why text) returns aiodlock.situation language plpgsql as $$
declare
  mine aiodlock.holder := s.mine;
  closed bigint := aiodlock.closed_until(mine);
  kept aiodlock.holder[];        -- in its place; null: the record stays as it is
  h aiodlock.holder;
begin
  if mine.rest > 0 and s.now_ms < closed then
    s.answer := 'released';  -- an earlier message has done it
  elsif s.now_ms >= mine.deadline and s.now_ms < closed and why = 'unused' then
    s.moved := mine.began and mine.hold_until > mine.deadline + mine.delay;  -- the grant came too late
    mine.began := false;
    mine.hold_until := 0;
    kept := case when s.now_ms < mine.deadline + mine.delay then array[mine] else '{}' end;
  elsif s.now_ms < mine.deadline and why = 'lost' and (mine.delay > 0 or (mine.began and s.now_ms < mine.hold_until)) then
    null;
  elsif s.now_ms < mine.deadline and why in ('ended', 'recorded') and s.now_ms < mine.hold_until then
    s.moved := mine.hold_until < closed;
    mine.deadline := s.now_ms;
    mine.length := 0;
    mine.rest := mine.hold_until - s.now_ms;
    kept := array[mine];
    s.keep_until := greatest(s.keep_until, mine.hold_until);
    s.durable := true;
    s.answer := 'released';
  elsif s.now_ms < mine.deadline then
    kept := '{}';
    s.answer := 'released';
  end if;
  if kept is not null then
    if cardinality(s.holders) > 1 then
      foreach h in array s.holders loop
        if h.id <> mine.id then
          kept := kept || h;
        end if;
      end loop;
    end if;
    s.holders := kept;
    s.changed := true;
    s.freed := true;
  end if;
  return s;
end $$;

create function aiodlock.leave(s aiodlock.situation, f text[]) returns aiodlock.situation language plpgsql as $$
declare
  rid text := f[3];
  withdrawn bigint;              -- when it has arrived, if it was waiting
begin
  s := aiodlock.settle(s, rid);
  if f[4] <> '0' then
    insert into aiodlock.marker as m values (rid, s.now_ms + f[4]::bigint)
      on conflict (id) do update set keep_until = greatest(m.keep_until, excluded.keep_until);
    s.marked_until := greatest(s.marked_until, s.now_ms + f[4]::bigint);
    s.keep_until := greatest(s.keep_until, s.marked_until);
    s.changed := true;
    s.durable := true;
  end if;
  if f[5] = 'recorded' and s.now_ms < s.recorded_until
    and exists (select from aiodlock.record r where r.key = s.key and r.id = rid) then
    s.answer := 'recorded';  -- the answer to an earlier message was lost
    s.durable := true;
    return s;
  elsif f[5] = 'recorded' and s.now_ms < (s.mine).deadline then
    return aiodlock.record_result(s, f);
  end if;
  if (s.mine).id is not null then
    s := aiodlock.end_mine(s, f[5]);
  end if;
  if s.answer is null then
    if s.head > 0 then
      delete from aiodlock.waiter w where w.id = rid and w.key = s.key returning w.arrival into withdrawn;
      if withdrawn = s.head then
        s.moved := true;
        s.freed := true;
      end if;
    end if;
    s.answer := case when (s.mine).id is null and withdrawn is not null then 'withdrawn'
                else aiodlock.or_broken(rid, s.now_ms, case when (s.mine).id is null then 'gone gone' else 'gone expired' end)
                end;
  end if;
  if s.head > 0 then
    s := aiodlock.grant_queue(s, rid);
  end if;
  return s;
end $$;

-- End all holders by force, or those with these tokens.
create function aiodlock.break_holders(s aiodlock.situation, remember bigint, meant bigint[]) returns aiodlock.situation
language plpgsql as $$
declare
  h aiodlock.holder;
  kept aiodlock.holder[] := '{}';
  broken integer := 0;
begin
  s := aiodlock.settle(s, null);
  foreach h in array s.holders loop
    if meant is not null and (s.now_ms >= h.deadline or h.token <> all (meant)) then
      kept := kept || h;
    elsif s.now_ms < h.deadline then
      broken := broken + 1;
      insert into aiodlock.broken as b values (h.id, greatest(s.now_ms + remember, h.deadline))
        on conflict (id) do update set keep_until = greatest(b.keep_until, excluded.keep_until);
      s.heard := aiodlock.say(s.heard, s.caller, h.client, concat_ws(' ', 'broken', h.id, s.key, h.token));
    end if;
  end loop;
  s.holders := kept;
  s.changed := true;
  s.durable := true;
  s.freed := true;
  s.moved := true;
  s.answer := 'broke ' || broken;
  if s.head > 0 then
    s := aiodlock.grant_queue(s, null);
  end if;
  return s;
end $$;

-- What operators and observers send.
create function aiodlock.manage(s aiodlock.situation, f text[]) returns aiodlock.situation language plpgsql as $$
declare
  h aiodlock.holder;
  kept aiodlock.holder[] := '{}';
begin
  case f[1]
  when 'break' then
    return aiodlock.break_holders(s, f[3]::bigint, string_to_array(f[4], ' ')::bigint[]);
  when 'announce' then
    perform aiodlock.tell('changes ' || s.key, s.key);
    s.answer := 'announced';
  when 'look' then
    -- Somebody saw that the clock was set back. What is clamped at each look and never written would not end.
    foreach h in array s.holders loop
      kept := kept || aiodlock.clamped(h, s.now_ms);
    end loop;
    s.holders := kept;
    update aiodlock.waiter w set deadline = s.now_ms + w.length
      where s.head > 0 and w.key = s.key and w.arrival >= s.head and w.deadline > s.now_ms + w.length;
    s.head_deadline := least(s.head_deadline, s.now_ms + s.head_length);
    s.changed := true;
    s.answer := 'looked';
  when 'forget' then
    s.answer := 'forgot ' || (s.now_ms < s.recorded_until)::integer;
    delete from aiodlock.record r where r.key = s.key;
    s.recorded_until := 0;
    s.changed := true;
    s.durable := true;
  end case;
  return s;
end $$;

-- A head that did not know when to look is told to, unless it will ask soon enough by itself.
create function aiodlock.advise_head(s aiodlock.situation, rid text) returns aiodlock.situation language plpgsql as $$
declare
  its_id text;
  its_client text;
begin
  if aiodlock.earliest_end(s.holders) < s.head_deadline - s.head_length * 2 / 3 then
    select w.id, w.client into its_id, its_client from aiodlock.waiter w where w.key = s.key and w.arrival = s.head;
    if its_id <> rid then
      s.heard := aiodlock.say(s.heard, s.caller, its_client, 'look ' || its_id || ' ' || s.key);
    end if;
  end if;
  return s;
end $$;

-- Carry one message out.
create function aiodlock.carry_out(s aiodlock.situation, f text[]) returns aiodlock.situation language plpgsql as $$
begin
  s.moved := false;
  if f[1] in ('acquire', 'extend') and s.now_ms < s.recorded_until then
    s.answer := case when length(s.result) <= 256 then 'done ' || s.result else 'done' end;
    s.durable := true;  -- what tells a record waits for a standby
  elsif f[1] = 'acquire' then
    s := aiodlock.acquire(s, f);
  elsif f[1] = 'extend' then
    s := aiodlock.extend(s, f);
  elsif f[1] = 'leave' then
    s := aiodlock.leave(s, f);
  else
    s := aiodlock.manage(s, f);
  end if;
  return case when s.moved and s.head > 0 then aiodlock.advise_head(s, f[3]) else s end;
end $$;

-- The general way: it reads each name, passes the messages about it to the functions of their verbs, and writes it.
-- The messages about one name follow each other, so that its row is read and written once.
create function aiodlock.general_way(caller text, retention bigint, messages text) returns text language plpgsql as $$
declare
  ops text[] := string_to_array(messages, E'\n');
  most integer := cardinality(ops);
  numbers integer[];             -- the messages' numbers, in the order in which they are carried out; null: as they are
  step integer := 1;
  k text;
  f text[];
  answers text := '';            -- in that order, each behind a new line
  s aiodlock.situation;
  done boolean;
begin
  -- Calls about the same name wait for each other here. The order is the same everywhere, so no two calls wait for
  -- each other. What needs no query is written as an assignment, because PERFORM would run one.
  if current_setting('transaction_isolation') <> 'read committed' then
    done := aiodlock.check_isolation() is null;
  end if;
  k := split_part(messages, E'\t', 2);
  if most = 1 or cardinality(string_to_array(messages, E'\t' || k || E'\t')) = most + 1 then
    done := pg_advisory_xact_lock(1095323471, hashtext(k)) is null;
  else
    select array_agg(o.number), array_agg(o.op) into numbers, ops from (
      select u.number, u.op, pg_advisory_xact_lock(1095323471, u.hash) from (
        select e.number, e.op, hashtext(split_part(e.op, E'\t', 2)) as hash
          from unnest(ops) with ordinality e(op, number) order by 3, split_part(e.op, E'\t', 2), 1
      ) u
    ) o;
  end if;
  s.now_us := aiodlock.clock_us();
  s.now_ms := s.now_us / 1000;
  s.caller := caller;
  s.retention := retention;

  while step <= most loop
    f := string_to_array(ops[step], E'\t');
    if f[2] is distinct from s.key then
      if s.changed then
        done := aiodlock.write_name(s) is null;
      end if;
      s := aiodlock.read_name(s, f[2]);
    end if;
    s.answer := null;
    if f[1] = 'extend' and cardinality(s.holders) > 0 then
      s := aiodlock.extend_holders(s, ops[step:]);
    end if;
    if s.answer is null then
      s := aiodlock.carry_out(s, f);
    end if;
    answers := answers || E'\n' || s.answer;
    step := step + cardinality(string_to_array(s.answer, E'\n'));
  end loop;
  if s.changed then
    done := aiodlock.write_name(s) is null;
  end if;

  if s.durable is null then
    -- Only releases: if a crash of the server forgets one, the lease ends at its deadline.
    done := set_config('synchronous_commit', 'off', true) is null;
  elsif current_setting('synchronous_standby_names') <> '' then
    perform aiodlock.wait_for_standby();
  end if;
  if numbers is not null then
    select string_agg(E'\n' || a.answer, '' order by a.number) into answers
      from unnest(string_to_array(substr(answers, 2), E'\n'), numbers) a(answer, number);
  end if;
  if length(s.heard) > 16000 then
    -- An answer must fit into what a connection takes without a reader: else a client that is paused would keep its
    -- names locked. Hints can be left out, and the client asks about all that it has.
    s.heard := E'\nlook * ' || s.key;
  end if;
  return substr(answers, 2) || coalesce(s.heard, '');
end $$;

-- The short way of a request that waits: if another one holds the name alone, this one is queued without a look at the queue.
-- With a lone holder nothing is on record, and there are markers only if the clock was set back.
create function aiodlock.queue_behind(caller text, now_us bigint, f text[]) returns text language plpgsql as $$
declare
  now_ms bigint := now_us / 1000;
  row_at tid;
  head_at bigint;
  look bigint;
  last_token bigint;
  arrived bigint;
begin
  select n.place, n.head, n.token, n.lone_until - now_ms into row_at, head_at, last_token, look
    from (select m.ctid as place, m.* from aiodlock.name m where m.key = f[2] order by m.version desc limit 1) n
    where n.lone > '' and n.lone <> f[3] and now_ms < n.lone_until and n.lone_until <= now_ms + n.lone_length
      and split_part(n.lone_words, E'\t', 6) <> f[5] and right(n.lone_words, 7) <> E'\tlinger'
      and (f[4] = 'x' or split_part(n.lone_words, E'\t', 5) = 'x') and f[9] = 'wait'
      and (n.head = 0 or (now_ms < n.head_deadline and n.head_deadline <= now_ms + n.head_length))
      and n.marked_until <= now_ms and (not @is_unlogged@ or f[6]::bigint <= n.noted)
      and current_setting('transaction_isolation') = 'read committed';
  if found then
    insert into aiodlock.waiter as w values (
        f[2], coalesce((select max(l.arrival) + 1 from aiodlock.waiter l where l.key = f[2] and l.arrival >= now_us), now_us),
        f[3], f[4], f[5], 0, caller, now_ms + f[7]::bigint, f[7]::bigint, now_ms, 0, coalesce(f[10], ''),
        coalesce(f[11], ''), coalesce(f[13] = 'linger', false)
      ) on conflict (id) do nothing returning w.arrival into arrived;
  end if;
  if arrived is null then
    return null;
  end if;
  if head_at = 0 then
    update aiodlock.name n set
        head = arrived, head_deadline = now_ms + f[7]::bigint, head_length = f[7]::bigint,
        writes = (n.writes + 1) % 32, version = n.version + (n.writes + 1) / 32
      where n.ctid = row_at;
  end if;
  return 'waiting ' || f[7] || ' ' || case when head_at = 0 then look else -1 end || ' ' || greatest(last_token, now_us);
end $$;

-- The short way of a hand-over. `rid` leaves; `f` is an acquire that stands in front of its leave, or null. If all that is to be done
-- is to queue that one and to grant to the first waiter, who excludes all others, two statements do it.
create function aiodlock.hand_over(caller text, retention bigint, now_us bigint, k text, rid text, f text[]) returns text
language plpgsql as $$
declare
  now_ms bigint := now_us / 1000;
  row_at tid;
  new_token bigint;
  -- Who is to hold.
  place tid;
  its_client text;
  its_id text;
  its_deadline bigint;
  its_length bigint;
  its_words text;
  -- The first waiter then, and when the message in front arrived.
  first_at bigint;
  first_deadline bigint;
  first_length bigint;
  arrived bigint;
  message text;
  answer text;
begin
  -- The next waiter must not hold by its owner, nor be overdue, nor have to be told when to look. Where nobody waits
  -- there is no `w`: then `head > 0` spares its search. It has nothing on record if `lone` is set.
  select n.place, greatest(n.token + 1, now_us), w.place, w.client, w.id, w.deadline, w.length,
      concat_ws(E'\t', w.client, '', '', '', w.mode, w.owner, '', '', '', '', w.note, w.description),
      coalesce(x.arrival, a.arrival, 0), coalesce(x.deadline, a.deadline, 0), coalesce(x.length, a.length, 0), a.arrival,
      coalesce('waiting ' || a.length || ' -1 ' || greatest(n.token, now_us) || E'\n', '') || 'released',
      w.id || ' ' || k || ' ' || greatest(n.token + 1, now_us)
    into row_at, new_token, place, its_client, its_id, its_deadline, its_length, its_words, first_at,
      first_deadline, first_length, arrived, answer, message
    from (select m.ctid as place, m.* from aiodlock.name m where m.key = k order by m.version desc limit 1) n
    cross join lateral (
      select l.ctid as place, l.* from aiodlock.waiter l where l.key = k and l.arrival >= n.head order by l.arrival limit 1
    ) w
    left join lateral (
      select l.* from aiodlock.waiter l where l.key = k and l.arrival > w.arrival order by l.arrival limit 1
    ) x on true
    left join lateral (
      select coalesce((select max(l.arrival) + 1 from aiodlock.waiter l where l.key = k and l.arrival >= now_us), now_us)
          as arrival, now_ms + f[7]::bigint as deadline, f[7]::bigint as length
        where f is not null
    ) a on true
    where n.lone = rid and now_ms < n.lone_until and n.head > 0 and n.marked_until <= now_ms
      and w.mode = 'x' and w.delay = 0 and w.hold = 0 and not w.lingers
      and now_ms < w.deadline and w.deadline <= now_ms + w.length
      and (x.id is null or (now_ms < x.deadline and x.deadline <= now_ms + x.length and x.owner <> w.owner
        and x.deadline - x.length * 2 / 3 <= w.deadline))
      and (f is null or (f[5] <> split_part(n.lone_words, E'\t', 6) and f[5] <> w.owner and f[9] = 'wait' and f[3] <> rid
        and (not @is_unlogged@ or f[6]::bigint <= n.noted) and a.deadline - a.length * 2 / 3 <= w.deadline
        and not exists (select from aiodlock.waiter l where l.id = f[3])))
      and current_setting('transaction_isolation') = 'read committed';
  if answer is null then
    return null;
  end if;
  with gone as (
    delete from aiodlock.waiter w where w.ctid = place
  ), queued as (
    insert into aiodlock.waiter
      select k, arrived, f[3], f[4], f[5], 0, caller, now_ms + f[7]::bigint, f[7]::bigint, now_ms, 0, coalesce(f[10], ''),
          coalesce(f[11], ''), coalesce(f[13] = 'linger', false)
        where arrived is not null
  )
  update aiodlock.name n set
      token = new_token, keep_until = greatest(n.keep_until, its_deadline, new_token / 1000 + 1 + retention),
      head = first_at, head_deadline = first_deadline, head_length = first_length,
      lone = its_id, lone_until = its_deadline, lone_length = its_length, lone_words = its_words,
      writes = (n.writes + 1) % 32, version = n.version + (n.writes + 1) / 32
    where n.ctid = row_at;
  return answer || coalesce(aiodlock.say(null, caller, its_client, 'granted ' || message), '');
end $$;

-- The messages with one verb, each with its number, its fields, the length of its lease, and where the newest row of
-- its name is. The offset keeps the fields from being taken apart again wherever they are used.
create function aiodlock.rows_of(ops text[], verb text) returns table (number integer, op text, f text[], ttl bigint, row_at tid)
language sql stable as $$
  select number::integer, op, f, case verb when 'acquire' then f[6] when 'extend' then f[4] end::bigint,
      (select m.ctid from aiodlock.name m where m.key = f[2] order by m.version desc limit 1)
    from (
      select o.number, o.op, string_to_array(o.op, E'\t') as f from unnest(ops) with ordinality o(op, number) offset 0
    ) fields
    where f[1] = verb offset 0
$$;

-- The short way of many messages. If each is about a name of its own, all free names are acquired with one statement,
-- all lone holders are extended with one, and all that release are released with one. The general way has the rest.
create function aiodlock.many(caller text, retention bigint, messages text) returns text
language plpgsql set enable_hashjoin = off set enable_mergejoin = off set enable_material = off as $$
declare
  ops text[] := string_to_array(messages, E'\n');
  most integer := cardinality(ops);
  names integer;
  answers text[] := array_fill(null::text, array[most]);
  answered integer := 0;
  number integer;
  answer text;
  further text[];                -- what the general way says to the other messages, and what is notified
  rest text := '';
  synchronous text;
  durable boolean := false;
  now_us bigint;
  now_ms bigint;
begin
  -- In the order of the general way, so that no two calls wait for each other.
  select count(distinct locked.key) into names from (
    select u.key, pg_advisory_xact_lock(1095323471, u.hash) from (
      select n.key, hashtext(n.key) as hash from (select split_part(op, E'\t', 2) as key from unnest(ops) op) n
        order by 2, 1
    ) u
  ) locked;
  if names < most then
    return aiodlock.general_way(caller, retention, messages);
  end if;
  now_us := aiodlock.clock_us();
  now_ms := now_us / 1000;

  if strpos(messages, E'acquire\t') > 0 then
    for number, answer in
      update aiodlock.name n set
          token = now_us, keep_until = greatest(n.keep_until, now_ms + a.ttl, now_ms + 1 + retention),
          lone = a.f[3], lone_until = now_ms + a.ttl, lone_length = a.ttl, lone_words = caller || E'\t' || a.op,
          writes = (n.writes + 1) % 32, version = n.version + (n.writes + 1) / 32
        from aiodlock.rows_of(ops, 'acquire') a
        where n.ctid = a.row_at and n.lone = '' and n.token < now_us and (not @is_unlogged@ or a.ttl <= n.noted)
          and a.f[8] = '0' and length(a.f[4]) = 1 and (a.f[12] is null or a.f[13] = 'linger')
        returning a.number, 'granted ' || now_us || ' ' || a.ttl
    loop
      answers[number] := answer;
      answered := answered + 1;
      durable := true;
    end loop;
  end if;
  if strpos(messages, E'extend\t') > 0 then
    for number, answer in
      update aiodlock.name n set
          keep_until = greatest(n.keep_until, now_ms + a.ttl), lone_until = now_ms + a.ttl, lone_length = a.ttl,
          writes = (n.writes + 1) % 32, version = n.version + (n.writes + 1) / 32
        from aiodlock.rows_of(ops, 'extend') a
        where n.ctid = a.row_at and n.lone = a.f[3] and now_ms < n.lone_until and n.lone_until <= now_ms + a.ttl
          and (not @is_unlogged@ or a.ttl <= n.noted)
        returning a.number, 'held ' || n.token || ' ' || a.ttl
    loop
      answers[number] := answer;
      answered := answered + 1;
      durable := true;
    end loop;
  end if;
  if strpos(messages, E'leave\t') > 0 then
    for number in
      update aiodlock.name n set lone = ''
        from aiodlock.rows_of(ops, 'leave') a
        where n.ctid = a.row_at and n.lone = a.f[3] and now_ms < n.lone_until and n.head = 0
          and a.f[4] = '0' and a.f[5] in ('ended', 'lost')
        returning a.number
    loop
      answers[number] := 'released';
      answered := answered + 1;
    end loop;
  end if;

  synchronous := current_setting('synchronous_commit');
  if answered < most then
    for place in 1 .. most loop
      if answers[place] is null then
        rest := rest || case when rest = '' then '' else E'\n' end || ops[place];
      end if;
    end loop;
    further := string_to_array(aiodlock.general_way(caller, retention, rest), E'\n');
    number := 0;
    for place in 1 .. most loop
      if answers[place] is null then
        number := number + 1;
        answers[place] := further[number];
      end if;
    end loop;
    answers := answers || further[number + 1 :];
    if durable then
      synchronous := set_config('synchronous_commit', synchronous, true);
    end if;
  elsif not durable then
    synchronous := set_config('synchronous_commit', 'off', true);  -- as in the general way
  end if;
  return array_to_string(answers, E'\n');
end $$;

-- All messages of one client's turn of its event loop, in one call.
--
-- caller     the client's label
-- retention  ms for which a free name's last token is kept
-- messages   one a line, its fields separated by tabs:
--              acquire  key  id  mode  owner  ttl  waiter-ttl  lock-delay  wait|nowait
--                       [note  description  [hold  linger | begins|later| with resize| behind it]]
--              extend   key  id  length  [begins]
--              leave    key  id  marker-ttl  ended|lost|unused
--              leave    key  id  marker-ttl  recorded  keep  result
--              break    key  remember  [tokens of those that are meant, with spaces between them]
--              look     key
--              forget   key
--              announce key
-- Result: one line for each message, in the same order, then what this client is notified of.
--   granted TOKEN LEFT | held TOKEN LEFT | busy | deadlock | limit MODE
--   recalled TOKEN LEFT        granted or held, and others want the name: it must not linger
--   waiting LEFT LOOK FLOOR    LOOK: ms until the earliest blocker ends if at the head, else -1
--   closed LEFT                after a crash that emptied unlogged tables
--   released | withdrawn | recorded | gone broken|expired|taken_over|gone | broke NUMBER | forgot 0|1 | looked
--   done [RESULT]              a success is on record; a long result is to be read by `recorded`
-- Notifications, here or by NOTIFY for other clients: granted ID KEY TOKEN (an r behind it: recalled at once) |
-- recall ID KEY | look ID (or *) KEY | broken ID KEY TOKEN | done ID,ID KEY (or * for all of the client's waiters).
--
-- In front stand the short ways, which are most calls: a free name is acquired, and the only holder of a name without waiters
-- extends or releases it, with one statement. Null: there is more to it.
create function aiodlock.turn(caller text, retention bigint, messages text) returns text
@called@ as $$
declare
  f text[] := string_to_array(messages, E'\t');
  ops text[];
  last text[];
  now_us bigint;
  length_ms bigint;
  answer text;
  done boolean;
begin
  if @is_unlogged@ and current_setting('synchronous_standby_names') <> '' then
    -- A transaction that writes to unlogged tables alone waits for no standby: the general way has it wait.
    return aiodlock.general_way(caller, retention, messages);
  elsif strpos(messages, E'\n') > 0 then
    ops := string_to_array(messages, E'\n');
    f := string_to_array(ops[1], E'\t');
    last := string_to_array(ops[2], E'\t');
    if cardinality(ops) > 2 or last[2] <> f[2] then
      return aiodlock.many(caller, retention, messages);
    elsif f[1] = 'acquire' and f[8] = '0' and length(f[4]) = 1 and (f[12] is null or f[13] = 'linger')
      and last[1] = 'leave' and last[4] = '0' and last[5] in ('ended', 'lost') then
      now_us := case when pg_advisory_xact_lock(1095323471, hashtext(f[2])) is null then 0 else aiodlock.clock_us() end;
      answer := aiodlock.hand_over(caller, retention, now_us, f[2], last[3], f);
    end if;
  elsif f[1] = 'acquire' and f[8] = '0' and length(f[4]) = 1 and (f[12] is null or f[13] = 'linger') then
    now_us := case when pg_advisory_xact_lock(1095323471, hashtext(f[2])) is null then 0 else aiodlock.clock_us() end;
    length_ms := f[6]::bigint;
    update aiodlock.name n set
        token = now_us, keep_until = greatest(n.keep_until, now_us / 1000 + length_ms, now_us / 1000 + 1 + retention),
        lone = f[3], lone_until = now_us / 1000 + length_ms, lone_length = length_ms, lone_words = caller || E'\t' || messages,
        writes = (n.writes + 1) % 32, version = n.version + (n.writes + 1) / 32
      where n.ctid = (select m.ctid from aiodlock.name m where m.key = f[2] order by m.version desc limit 1)
        and n.lone = '' and n.token < now_us and (not @is_unlogged@ or length_ms <= n.noted)
      returning 'granted ' || now_us || ' ' || length_ms into answer;
    if answer is null then
      answer := aiodlock.queue_behind(caller, now_us, f);
    end if;
  elsif f[1] = 'extend' then
    now_us := case when pg_advisory_xact_lock(1095323471, hashtext(f[2])) is null then 0 else aiodlock.clock_us() end;
    length_ms := f[4]::bigint;
    update aiodlock.name n set
        keep_until = greatest(n.keep_until, now_us / 1000 + length_ms), lone_until = now_us / 1000 + length_ms,
        lone_length = length_ms, writes = (n.writes + 1) % 32, version = n.version + (n.writes + 1) / 32
      where n.ctid = (select m.ctid from aiodlock.name m where m.key = f[2] order by m.version desc limit 1)
        and n.lone = f[3] and now_us / 1000 < n.lone_until and n.lone_until <= now_us / 1000 + length_ms
        and (not @is_unlogged@ or length_ms <= n.noted)
      returning 'held ' || n.token || ' ' || length_ms into answer;
  elsif f[1] = 'leave' and f[4] = '0' and f[5] in ('ended', 'lost') then
    now_us := case when pg_advisory_xact_lock(1095323471, hashtext(f[2])) is null then 0 else aiodlock.clock_us() end;
    update aiodlock.name n set lone = ''
      where n.ctid = (select m.ctid from aiodlock.name m where m.key = f[2] order by m.version desc limit 1)
        and n.lone = f[3] and n.head = 0 and now_us / 1000 < n.lone_until
      returning 'released' into answer;
    if answer is null then
      answer := aiodlock.hand_over(caller, retention, now_us, f[2], f[3], null);
    else
      done := set_config('synchronous_commit', 'off', true) is null;  -- as in the general way
    end if;
  end if;
  if answer is null then
    return aiodlock.general_way(caller, retention, messages);
  end if;
  return answer;
end $$;

-- What people want to know of a name. First a row about the name: its last token, the ms for which lock-delay
-- keeps it closed, how many holders' places, and as `ago_ms` whether the clock was set back: then the caller sends
-- `look`. Then the holders, with the ms since their grant and the length of their lease, the success on record, and the waiters in their order.
-- Who waits is told with `queues` alone.
create function aiodlock.inspect(k text, queues boolean default true) returns table (
  what text, owner text, mode text, token bigint, left_ms bigint, client text, places bigint, note text,
  description text, ago_ms bigint, length_ms bigint
) stable @called@ as $$
declare
  now_us bigint := aiodlock.clock_us();
  now_ms bigint := now_us / 1000;
  present aiodlock.name;
  h aiodlock.holder;
  closed bigint := 0;
  closed_places bigint := 0;
  set_back boolean;
begin
  select * into present from aiodlock.name n where n.key = k order by n.version desc limit 1;
  set_back := present.head > 0 and exists (select from aiodlock.waiter w
    where w.key = k and w.arrival >= present.head and w.deadline > now_ms + w.length);
  foreach h in array coalesce(aiodlock.holders_of(present), '{}') loop
    set_back := set_back or h.deadline > now_ms + h.length or h.hold_until > now_ms + h.hold;
    h.deadline := least(h.deadline, now_ms + h.length);
    h.hold_until := least(h.hold_until, now_ms + h.hold);
    if now_ms < h.deadline then
      return query select 'holder', h.owner, h.mode, h.token, h.deadline - now_ms, h.client, 0::bigint, h.note,
        h.description, (now_us - h.token) / 1000, h.length;
    elsif now_ms < aiodlock.closed_until(h) then
      closed := greatest(closed, aiodlock.closed_until(h) - now_ms);
      closed_places := closed_places + 1;
    end if;
  end loop;
  if present.key is not null then
    return query select 'name', null, 's' || present.places || case when present.resized then 'r' else '' end,
      case when now_ms < present.keep_until then present.token else 0 end, closed, null, closed_places, null, null,
      set_back::integer::bigint, 0::bigint;
  end if;
  if now_ms < present.recorded_until then
    return query select 'record', null, null, 0::bigint, r.keep_until - now_ms, null, 0::bigint, null, null,
      greatest(0, now_ms - r.recorded_at), 0::bigint
      from aiodlock.record r where r.key = k;
  end if;
  -- Nobody waits in front of the head. Without that bound, it would walk through the places of all who have waited.
  return query
    select 'waiter', w.owner, w.mode, 0::bigint, greatest(0, now_ms - w.since), w.client, 0::bigint, w.note,
      w.description, 0::bigint, 0::bigint
    from aiodlock.waiter w
    where queues and present.head > 0 and w.key = k and w.arrival >= present.head
      and now_ms < least(w.deadline, now_ms + w.length) order by w.arrival;
end $$;

-- Keep what a client tells of its waits, unless it has told something newer: an old call may arrive late. Without a record, only
-- keep the one of this serial longer. Returns false if there is nothing to be kept.
create function aiodlock.tell_waits(told_by text, told bigint, waits bytea, keep_ms bigint) returns boolean
volatile @called@ as $$
declare
  until bigint := aiodlock.clock_us() / 1000 + keep_ms;
begin
  if waits is null then
    update aiodlock.wait w set keep_until = until where w.client = told_by and w.serial >= told;
    return found;
  end if;
  insert into aiodlock.wait as w values (told_by, told, waits, until)
    on conflict (client) do update set serial = told, record = waits, keep_until = until where w.serial <= told;
  return true;
end $$;

-- What these clients have told of their waits.
create function aiodlock.waits_of(asked text[]) returns table (client text, record bytea) stable @called@ as $$
begin
  return query select w.client, w.record from aiodlock.wait w
    where w.client = any(asked) and aiodlock.clock_us() / 1000 < w.keep_until and length(w.record) > 0;
end $$;

-- Delete what has had its time. One client at a time, now and then; a name's lock is taken only if nobody has it.
-- A call looks at so many pages of one table, from `place` on (the table's letter and a page's number), and at so many
-- names with locks of their own at the most. It reads page by page: by an index it would be in the order of the keys, a
-- page for each. Returns where the next call goes on, or null at the end; and of how many names it has deleted what
-- has had its time. It goes on if its client has given it up: where the table has to be read from the disk, each attempt
-- takes long.
create function aiodlock.sweep(pages integer, most integer, inout place text, out swept integer)
@called@ set client_connection_check_interval = 0 as $$
declare
  now_ms bigint := aiodlock.clock_us() / 1000;
  letter text := left(place, 1);
  page bigint := substr(place, 2)::bigint;
  next_page bigint := page + pages;
  here tid := format('(%s,0)', page)::tid;
  there tid := format('(%s,0)', next_page)::tid;
  candidate text;
  found_at tid;
  found_names integer := 0;
begin
  swept := 0;
  if not pg_try_advisory_xact_lock(1095323472, 0) then
    place := null;
    return;
  end if;
  if letter = 'm' then
    delete from aiodlock.marker m where m.ctid >= here and m.ctid < there and m.keep_until <= now_ms;
    delete from aiodlock.wait w where w.keep_until <= now_ms;  -- it is small
  elsif letter = 'b' then
    delete from aiodlock.broken b where b.ctid >= here and b.ctid < there and b.keep_until <= now_ms;
  elsif letter = 'r' then
    delete from aiodlock.record r where r.ctid >= here and r.ctid < there and r.keep_until <= now_ms;
  else
    for candidate, found_at in
      select n.key, n.ctid from aiodlock.name n where n.ctid >= here and n.ctid < there and n.keep_until <= now_ms
        and not exists (select from aiodlock.waiter w
          where n.head > 0 and w.key = n.key and w.arrival >= n.head and now_ms < w.deadline) limit most
    loop
      found_names := found_names + 1;
      if pg_try_advisory_xact_lock(1095323471, hashtext(candidate)) then
        -- Somebody may have taken the name since all candidates were read, also after the clock was set back.
        now_ms := aiodlock.clock_us() / 1000;
        delete from aiodlock.name n where n.key = candidate and n.keep_until <= now_ms
          and not exists (select from aiodlock.waiter w
            where n.head > 0 and w.key = n.key and w.arrival >= n.head and now_ms < w.deadline);
        if found then  -- the waiters that died behind a dead holder: nobody asks for the name, who would find them
          delete from aiodlock.waiter w where w.key = candidate and w.deadline <= now_ms;
        end if;
        swept := swept + 1;
      end if;
    end loop;
    if found_names = most then
      -- The page may have more. If nothing was deleted, all that was found is in use: go on behind it.
      next_page := greatest(page + (swept = 0)::integer, (found_at::text::point)[0]::bigint);
    end if;
  end if;
  if next_page * current_setting('block_size')::bigint < pg_relation_size(
      case letter when 'm' then 'aiodlock.marker' when 'b' then 'aiodlock.broken' when 'r' then 'aiodlock.record'
      else 'aiodlock.name' end::regclass) then
    place := letter || next_page;
  else
    place := case letter when 'm' then 'b0' when 'b' then 'r0' when 'r' then 'n0' end;
  end if;
end $$;

-- The result on record for a name, read without the name's lock; null if there is none any more.
create function aiodlock.recorded(k text) returns text language sql stable security definer
set search_path = pg_catalog, pg_temp as $$
  select r.result from aiodlock.record r where r.key = k and aiodlock.clock_us() / 1000 < r.keep_until
$$;

-- A client that has connected: what is installed here, and which history this is; on a standby the history is null. Sees,
-- too, whether a crash has emptied the tables. flushed: so many bytes of the log are on the disk.
create function aiodlock.hello(
  out version integer, out durability text, out system text, out timeline integer, out history text, out born_us bigint,
  out flushed bigint
) @called@ as $$
begin
  perform aiodlock.check_isolation();
  select m.version, m.durability into version, durability from aiodlock.meta m;
  select c.system_identifier::text into system from pg_control_system() c;
  timeline := ('x' || aiodlock.timeline())::bit(32)::integer;
  if timeline is null or current_setting('transaction_read_only')::boolean then
    return;
  end if;
  flushed := pg_wal_lsn_diff(pg_current_wal_flush_lsn(), '0/0');
  select h.id, h.born_us into history, born_us from aiodlock.history h where h.timeline = hello.timeline;
  if history is null then
    -- This is of this server alone. And a client has to come in while the standby is away.
    perform set_config('synchronous_commit', 'local', true);
    insert into aiodlock.history values (timeline, gen_random_uuid()::text, aiodlock.clock_us()) on conflict do nothing;
    select h.id, h.born_us into history, born_us from aiodlock.history h where h.timeline = hello.timeline;
  end if;
  if durability = 'unlogged' then
    perform pg_advisory_xact_lock(1095323472, 1);
    insert into aiodlock.present select aiodlock.clock_us() / 1000 + least(m.longest, 86400000) from aiodlock.meta m
      where not exists (select from aiodlock.present);
  end if;
end $$;

-- Keys between these two, in their order, and whether each is held, waited for or on record. A call looks at so many rows of
-- each table at the most: extensions wait behind it. The next one goes on behind the last key; without any, there are no more.
create function aiodlock.names(after text, until text, most integer) returns table (key text, used boolean)
stable @called@ as $$
begin
  return query
    select f.key, bool_or(f.used) from (
      (select n.key, n.lone > '' or cardinality(n.holders) > 0 as used from aiodlock.name n
        where n.key > after and n.key < until order by n.key limit most)
      union all
      (select w.key, true from aiodlock.waiter w where w.key > after and w.key < until order by w.key limit most)
      union all
      (select r.key, true from aiodlock.record r where r.key > after and r.key < until order by r.key limit most)
      -- Of the last key, what uses it stands before the rest is cut off. It is null where `lone` is.
      order by key, used desc nulls last limit most
    ) f group by f.key order by f.key;
end $$;

revoke all on all functions in schema aiodlock from public;
-- Each client needs these, and they tell little. To use the schema is a right of its own.
grant select on aiodlock.history to public;
grant execute on function aiodlock.version, aiodlock.versions to public;
