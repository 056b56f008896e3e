-- What aiodlock keeps in PostgreSQL: tables, and the functions that are the protocol.
--
-- Filled in before it runs: @unlogged@ (the word "unlogged", or nothing), @is_unlogged@, @version@, and @called@, which is
-- the language, the rights and the settings of the functions that clients call.
-- Every decision is made and written in one call of `turn`. `acquire_one`, `leave_one` and `turn_many` are the same, with
-- short ways for the common cases in front. Calls about the same name wait for each other at an advisory lock; the clock is read
-- behind it. Deadlines are milliseconds of the server's clock, tokens microseconds.
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

-- The word of a grant that is told to another client. With a standby the grant may be visible and not there yet: then the
-- waiter asks, and the answer waits for the standby.
create function aiodlock.granted_word() returns text language sql stable as
$$ select case when current_setting('synchronous_standby_names') = '' then 'granted ' else 'look ' end $$;

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

-- What `holders_of` reads of a lone holder.
create function aiodlock.lone_words(h aiodlock.holder) returns text language sql immutable as $$
  select coalesce(concat_ws(E'\t', h.client, '', '', '', h.mode, h.owner, '', '', '', '', h.note, h.description), '')
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
-- The messages about one name follow each other, so that its row is read and written once.
create function aiodlock.turn(caller text, retention bigint, messages text) returns text
@called@ as $$
<<present>>
declare
  ops text[] := string_to_array(messages, E'\n');
  most integer := cardinality(ops);
  sequence integer[];            -- the messages' numbers, name by name; null: as they are
  answers text[] := ops;         -- each is overwritten by its answer
  heard text;                    -- each begins with a new line
  now_us bigint;
  now_ms bigint;
  done boolean;
  one_name boolean;
  durable boolean;               -- what was written must survive a crash before anybody is told
  -- The message.
  number integer;
  f text[];
  verb text;
  rid text;
  -- The name, as it is in its row and as it will be written.
  k text;
  version bigint;                -- null: there is no row
  last_token bigint;
  keep_until bigint;
  head_at bigint;
  head_deadline bigint;
  head_length bigint;
  marked_until bigint;
  recorded_until bigint;
  result text;                   -- what is on record until then
  places bigint;
  resized boolean;
  holding aiodlock.holder[];
  ids text[];                    -- of `holding`, in its order; null if they were not read since it has changed
  lone text;
  noted bigint;
  row_at tid;
  changed boolean;               -- it has to be written
  h aiodlock.holder;
  token_held bigint;
  ends bigint;
  message text;
  -- Of unlogged tables.
  longest bigint;
  opened_at bigint;
begin
  -- Calls about the same name wait for each other here. The order is the same everywhere, so no two calls wait for
  -- each other. What needs no query is written as an assignment, because PERFORM would run one.
  if current_setting('transaction_isolation') <> 'read committed' then
    done := aiodlock.check_isolation() is null;
  end if;
  k := split_part(messages, E'\t', 2);
  one_name := most = 1 or cardinality(string_to_array(messages, E'\t' || k || E'\t')) = most + 1;
  if one_name then
    done := pg_advisory_xact_lock(1095323471, hashtext(k)) is null;
  else
    select array_agg(locked.number) into sequence from (
      select o.number, pg_advisory_xact_lock(1095323471, o.hash) from (
        select u.number, hashtext(u.key) as hash from (
          select e.number, split_part(e.op, E'\t', 2) as key from unnest(ops) with ordinality e(op, number)
        ) u order by 2, u.key, 1
      ) o
    ) locked;
  end if;
  now_us := aiodlock.clock_us();
  now_ms := now_us / 1000;
  k := null;

  for step in 1 .. most + 1 loop
    exit when step > most and k is null;
    number := coalesce(sequence[step], step);
    f := string_to_array(ops[number], E'\t');

    verb := f[1];
    rid := f[3];
    if step > most or k is distinct from f[2] then
      -- Write the name of before. The row outlives its holding, and the last token by `retention`.
      if changed then
        -- Where nobody holds, nobody waits either.
        lone := null;
        h := null;
        if cardinality(holding) < 2 and now_ms >= marked_until and recorded_until = 0 then
          h := holding[1];
          lone := case when h.id is null then ''
                  when length(h.mode) = 1 and h.token = last_token and h.delay = 0 and h.hold = 0 and h.rest = 0 and h.lingers = 0 then h.id end;
          if lone > '' then
            holding := '{}';
          end if;
        end if;
        if version is null then
          insert into aiodlock.name values (
            k, 1, 0, last_token, keep_until, head_at, head_deadline, head_length, marked_until, recorded_until, places,
            resized, holding, lone, coalesce(h.deadline, 0), coalesce(h.length, 0), aiodlock.lone_words(h), noted
          );
        else
          -- Beside a transaction that stays open, no old row can be removed, and a look-up walks through those of
          -- the same version. So there are few of them.
          update aiodlock.name n set
              token = last_token, keep_until = present.keep_until, head = head_at,
              head_deadline = present.head_deadline, head_length = present.head_length,
              marked_until = present.marked_until, recorded_until = present.recorded_until,
              places = present.places, resized = present.resized, holders = holding,
              lone = present.lone, lone_until = coalesce(h.deadline, 0), lone_length = coalesce(h.length, 0),
              lone_words = aiodlock.lone_words(h), noted = present.noted, writes = (n.writes + 1) % 32, version = n.version + (n.writes + 1) / 32
            where n.ctid = row_at;
        end if;
        changed := false;
      end if;
      exit when step > most;
      k := f[2];
      ids := null;
      select n.ctid, n.version, n.token, n.keep_until, n.head, n.head_deadline, n.head_length, n.marked_until,
          n.recorded_until, n.places, n.resized, case when n.lone > '' then aiodlock.holders_of(n) else n.holders end,
          n.lone, n.noted
        into row_at, version, last_token, keep_until, head_at, head_deadline, head_length, marked_until,
          recorded_until, places, resized, holding, lone, noted
        from aiodlock.name n where n.key = k order by n.version desc limit 1;
      if version is null then
        last_token := 0;
        keep_until := 0;
        head_at := 0;
        head_deadline := 0;
        head_length := 0;
        marked_until := 0;
        recorded_until := 0;
        places := 0;
        resized := false;
        holding := '{}';
        lone := null;
        noted := 0;
      end if;
      if recorded_until > 0 then
        -- A sweep may have deleted it, by a later clock.
        select r.result into result from aiodlock.record r where r.key = k;
        if not found or now_ms >= recorded_until then
          recorded_until := 0;  -- or it would come back when the clock is set back
          changed := true;
        end if;
      end if;
    end if;

    declare  -- everything is null for each message
      answer text;
      mine aiodlock.holder;        -- the record of its request, if that holds
      seat integer;                -- where in `holding` that is, if it is one of several and extends
      own aiodlock.waiter;         -- the same, if it waits
      head aiodlock.waiter;
      taken boolean;               -- the head was removed from the queue
      kept aiodlock.holder[];
      client text;
      nearer boolean;              -- the record keeps the name closed for less time than before
      stale boolean;               -- records have to be clamped or dropped
      asked bigint;                -- how many places a semaphore should have
      freed boolean;               -- the head may get in now, or is another one
      moved boolean;               -- the head is a new one, or its blocker ends sooner
      late text[];                 -- granted and lingering: to be told when it is known whether somebody still waits
    begin
      -- The request's own record. Records to be clamped (the clock was set back) or dropped are rare.
      if verb = 'extend' and cardinality(holding) > 1 then
        -- Where many hold they extend together. To walk through all of them for each one would take too long.
        ids := coalesce(ids, array(select u.id from unnest(holding) with ordinality u order by u.ordinality));
        seat := array_position(ids, rid);
        if seat is not null then
          mine := holding[seat];
          mine.deadline := least(mine.deadline, now_ms + mine.length);
          mine.hold_until := least(mine.hold_until, now_ms + mine.hold);
        end if;
      end if;
      if cardinality(holding) > 0 and (seat is null or now_ms >= mine.deadline) then
        foreach h in array holding loop
          if h.id = rid then
            mine := h;
            mine.deadline := least(h.deadline, now_ms + h.length);
            mine.hold_until := least(h.hold_until, now_ms + h.hold);
          end if;
          stale := stale or h.deadline > now_ms + h.length or h.hold_until > now_ms + h.hold
            or now_ms >= aiodlock.closed_until(h);
        end loop;
      end if;

      if verb = 'extend' and now_ms < mine.deadline then
        -- Not shorter than what was promised before: else the clamp would bring the deadline nearer.
        mine.deadline := greatest(mine.deadline, now_ms + f[4]::bigint);
        mine.length := greatest(f[4]::bigint, mine.deadline - now_ms);
        mine.began := mine.began or f[5] is not null;
        holding[coalesce(seat, 1)] := mine;
        if @is_unlogged@ and mine.length + mine.delay > coalesce(longest, -1) then
          longest := aiodlock.note_length(mine.length + mine.delay);
        end if;
        keep_until := greatest(keep_until, aiodlock.closed_until(mine));
        changed := true;
        durable := true;
        answers[number] := case when mine.lingers = 2 then 'recalled ' else 'held ' end || mine.token || ' '
                           || mine.deadline - now_ms;
        continue;
      elsif verb = 'announce' then
        perform aiodlock.tell('changes ' || k, k);
        answers[number] := 'announced';
        continue;
      elsif verb = 'look' then
        -- Somebody saw that the clock was set back. What is clamped at each look and never written would not end.
        kept := '{}';
        foreach h in array holding loop
          h.deadline := least(h.deadline, now_ms + h.length);
          h.hold_until := least(h.hold_until, now_ms + h.hold);
          kept := kept || h;
        end loop;
        holding := kept;
        update aiodlock.waiter w set deadline = now_ms + w.length
          where head_at > 0 and w.key = k and w.arrival >= head_at and w.deadline > now_ms + w.length;
        head_deadline := least(head_deadline, now_ms + head_length);
        changed := true;
        answers[number] := 'looked';
        continue;
      elsif verb in ('acquire', 'extend') and now_ms < recorded_until then
        answers[number] := case when length(result) <= 256 then 'done ' || result else 'done' end;
        durable := true;  -- what tells a record waits for a standby
        continue;
      elsif verb = 'forget' then
        answers[number] := 'forgot ' || (now_ms < recorded_until)::integer;
        delete from aiodlock.record r where r.key = k;
        recorded_until := 0;
        changed := true;
        durable := true;
        continue;
      end if;
      ids := null;

      if verb = 'acquire' then
        if now_ms < marked_until
          and exists (select from aiodlock.marker m where m.id = rid and now_ms < m.keep_until) then
          answers[number] := 'gone gone';
          continue;
        end if;
        if @is_unlogged@ then
          ends := greatest(f[6]::bigint + f[8]::bigint, f[12]::bigint);
          if ends > coalesce(longest, -1) then
            longest := aiodlock.note_length(ends);
          end if;
          if noted = 0 then
            -- No request for the name has passed here since the tables were last emptied. A row alone says nothing: a
            -- leave with a marker, a break and a forget make one too.
            opened_at := coalesce(opened_at, aiodlock.opened(now_ms));
            if now_ms < opened_at then
              answers[number] := 'closed ' || opened_at - now_ms;
              durable := true;  -- the longest lease, too: later requests find it noted
              continue;
            end if;
          end if;
          if ends > noted then
            noted := ends;
            changed := true;
          end if;
        end if;
      end if;

      if stale then
        kept := '{}';
        foreach h in array holding loop
          h.deadline := least(h.deadline, now_ms + h.length);
          h.hold_until := least(h.hold_until, now_ms + h.hold);
          if now_ms < aiodlock.closed_until(h) then
            kept := kept || h;
          else
            freed := true;
          end if;
        end loop;
        holding := kept;
        kept := null;
        changed := true;
      end if;

      -- What the message changes by itself.
      if verb = 'extend' then
        if head_at > 0 then
          select * into own from aiodlock.waiter w where w.id = rid and w.key = k;
        end if;
        if own.id is not null then
          own.deadline := least(own.deadline, now_ms + own.length);
          if now_ms < own.deadline then
            own.deadline := greatest(own.deadline, now_ms + f[4]::bigint);
            own.length := greatest(f[4]::bigint, own.deadline - now_ms);
            update aiodlock.waiter w set deadline = own.deadline, length = own.length where w.id = rid;
            if own.arrival = head_at then
              -- Or it would not be noticed that the clock was set back by less than this.
              head_deadline := own.deadline;
              head_length := own.length;
              changed := true;
            end if;
          else
            -- Too late, and maybe at the head: then the next one has to be told, nobody else will.
            delete from aiodlock.waiter w where w.id = rid;
            moved := own.arrival = head_at;
            freed := freed or moved;
            own := null;
          end if;
        end if;
      elsif verb = 'leave' then
        if f[4] <> '0' then
          insert into aiodlock.marker as m values (rid, now_ms + f[4]::bigint)
            on conflict (id) do update set keep_until = greatest(m.keep_until, excluded.keep_until);
          marked_until := greatest(marked_until, now_ms + f[4]::bigint);
          keep_until := greatest(keep_until, marked_until);
          changed := true;
          durable := true;
        end if;
        if f[5] = 'recorded' and now_ms < recorded_until
          and exists (select from aiodlock.record r where r.key = k and r.id = rid) then
          answers[number] := 'recorded';  -- the answer to an earlier message was lost
          durable := true;
          continue;
        elsif f[5] = 'recorded' and now_ms < mine.deadline then
          recorded_until := now_ms + f[6]::bigint;
          result := f[7];
          keep_until := greatest(keep_until, recorded_until);
          insert into aiodlock.record values (k, rid, f[7], recorded_until, now_ms)
            on conflict (key) do update
            set id = excluded.id, result = excluded.result, keep_until = excluded.keep_until, recorded_at = excluded.recorded_at;
          for client, message in
            with waiting as (
              delete from aiodlock.waiter w where w.key = k and w.arrival >= head_at returning w.client, w.id, w.arrival
            )
            select w.client, string_agg(w.id, ',' order by w.arrival) from waiting w
              group by w.client order by min(w.arrival)
          loop
            -- A notification has less than 8000 bytes. Ids and names in keys are ASCII.
            message := 'done ' || case when length(message) + length(k) < 7900 then message else '*' end || ' ' || k;
            if client = caller then
              heard := coalesce(heard, '') || E'\n' || message;
            else
              perform aiodlock.tell(client, message);
            end if;
          end loop;
          holding := '{}';
          head_at := 0;
          head_deadline := 0;
          head_length := 0;
          changed := true;
          durable := true;
          answers[number] := 'recorded';
          continue;
        end if;
        -- What this leave makes of the request's record, if it holds: nothing, or what still keeps the name closed.
        if mine.rest > 0 and now_ms < aiodlock.closed_until(mine) then
          answer := 'released';  -- an earlier message has done it
        elsif now_ms >= mine.deadline and now_ms < aiodlock.closed_until(mine) and f[5] = 'unused' then
          nearer := mine.began and mine.hold_until > mine.deadline + mine.delay;  -- the grant came too late
          mine.began := false;
          mine.hold_until := 0;
          kept := case when now_ms < mine.deadline + mine.delay then array[mine] else '{}' end;
        elsif now_ms < mine.deadline and f[5] = 'lost'
          and (mine.delay > 0 or (mine.began and now_ms < mine.hold_until)) then
          null;
        elsif now_ms < mine.deadline and f[5] in ('ended', 'recorded') and now_ms < mine.hold_until then
          nearer := mine.hold_until < aiodlock.closed_until(mine);
          mine.deadline := now_ms;
          mine.length := 0;
          mine.rest := mine.hold_until - now_ms;
          kept := array[mine];
          keep_until := greatest(keep_until, mine.hold_until);
          durable := true;
          answer := 'released';
        elsif now_ms < mine.deadline then
          kept := '{}';
          answer := 'released';
        end if;
        if kept is not null then
          if cardinality(holding) > 1 then
            foreach h in array holding loop
              if h.id <> rid then
                kept := kept || h;
              end if;
            end loop;
          end if;
          holding := kept;
          changed := true;
          freed := true;
          moved := moved or nearer;
        end if;
        if answer is null then
          if head_at > 0 then
            delete from aiodlock.waiter w where w.id = rid and w.key = k returning * into own;
            if own.arrival = head_at then
              moved := true;
              freed := true;
            end if;
          end if;
          -- Lost, here or for its holder, and within its lock-delay: leaving does not open the name early.
          answer := case when mine.id is not null then 'gone expired' when own.id is not null then 'withdrawn'
                    else 'gone gone' end;
          own := null;
        end if;
      elsif verb = 'break' then
        ends := 0;
        kept := '{}';
        foreach h in array holding loop
          if f[4] is not null and (now_ms >= h.deadline or h.token <> all (string_to_array(f[4], ' ')::bigint[])) then
            kept := kept || h;
          elsif now_ms < h.deadline then
            ends := ends + 1;
            insert into aiodlock.broken as b values (h.id, greatest(now_ms + f[3]::bigint, h.deadline))
              on conflict (id) do update set keep_until = greatest(b.keep_until, excluded.keep_until);
            message := 'broken ' || h.id || ' ' || k || ' ' || h.token;
            if h.client = caller then
              heard := coalesce(heard, '') || E'\n' || message;
            else
              perform aiodlock.tell(h.client, message);
            end if;
          end if;
        end loop;
        holding := kept;
        changed := true;
        durable := true;
        freed := true;
        moved := true;
        answer := 'broke ' || ends;
      end if;

      -- Grant from the head on, as far as the holders allow. Nobody passes the one that stays. As long as no holder
      -- is gone and the head is not overdue, there is nothing to grant.
      loop
        if head_at > 0 and (freed or now_ms >= head_deadline or head_deadline > now_ms + head_length) then
          loop
            taken := cardinality(holding) = 0;  -- then any head fits
            if taken then
              delete from aiodlock.waiter w where w.ctid = (
                select l.ctid from aiodlock.waiter l where l.key = k and l.arrival >= head_at order by l.arrival limit 1
              ) returning w.* into head;
            else
              select * into head from aiodlock.waiter w
                where w.key = k and w.arrival >= head_at order by w.arrival limit 1;
            end if;
            exit when head.id is null;
            if head.deadline > now_ms + head.length then
              -- The clock was set back. All at once: many dead waiters cost together what one costs.
              update aiodlock.waiter w set deadline = now_ms + w.length
                where w.key = k and w.deadline > now_ms + w.length;
              head.deadline := now_ms + head.length;
            end if;
            if now_ms >= head.deadline then
              if not taken then
                delete from aiodlock.waiter w where w.id = head.id;
              end if;
              head_at := head.arrival + 1;
              moved := true;
              continue;
            end if;
            token_held := case when cardinality(holding) > 1 or (holding[1]).owner = head.owner
                          then aiodlock.token_of(head.owner, holding, now_ms) end;
            if token_held > 0 or (token_held < 0 and head.mode <> 'x') then
              token_held := abs(token_held);
            elsif cardinality(holding) = 0 or (head.mode <> 'x' and aiodlock.fits(head.mode, holding, places)) then
              token_held := greatest(last_token + 1, now_us);
              last_token := token_held;
              keep_until := greatest(keep_until, last_token / 1000 + 1 + retention);
            else
              exit;
            end if;
            -- A granted waiter keeps the deadline it had: a ghost that is granted costs no more than one that waits.
            h := row(
              head.id, head.mode, token_held, head.deadline, head.length, head.delay, head.owner, head.client,
              head.hold, now_ms + head.hold, false, 0, head.note, head.description, head.lingers::integer
            );
            holding := holding || h;
            keep_until := greatest(keep_until, h.deadline + h.delay, h.hold_until);
            if not taken then
              delete from aiodlock.waiter w where w.id = head.id;
            end if;
            head_at := head.arrival + 1;
            durable := true;
            moved := true;
            if head.id = rid then
              mine := h;
              own := null;
            end if;
            message := head.id || ' ' || k || ' ' || token_held;
            if head.lingers then
              late := late || head.id;
            elsif head.client = caller then
              heard := coalesce(heard, '') || E'\ngranted ' || message;
            else
              perform aiodlock.tell(head.client, aiodlock.granted_word() || message);
            end if;
          end loop;
          head_at := coalesce(head.arrival, 0);
          head_deadline := coalesce(head.deadline, 0);
          head_length := coalesce(head.length, 0);
          changed := true;
          freed := false;
          if late is not null then
            -- While anybody waits, each holder that lingers is recalled.
            for place in 1 .. cardinality(holding) loop
              h := holding[place];
              if h.id = any (late) then
                message := h.id || ' ' || k || ' ' || h.token;
                if head_at > 0 then
                  h.lingers := 2;
                  holding[place] := h;
                  message := message || 'r';
                end if;
                if h.id = rid then
                  mine := h;
                end if;
                if h.client = caller then
                  heard := coalesce(heard, '') || E'\ngranted ' || message;
                else
                  perform aiodlock.tell(h.client, aiodlock.granted_word() || message);
                end if;
              end if;
            end loop;
            late := null;
          end if;
        end if;
        if verb = 'acquire' and length(f[4]) > 1 and asked is null then
          -- The first one says how many places there are. Others have to say the same, or to follow.
          asked := substr(f[4], 2)::bigint;
          if head_at > 0 then
            select * into own from aiodlock.waiter w where w.id = rid and w.key = k and now_ms < w.deadline;
          end if;
          if own.id is not null or (mine.id is not null and now_ms < aiodlock.closed_until(mine)) then
            null;  -- known
          elsif right(f[13], 6) = 'resize' or (cardinality(holding) = 0 and head_at = 0) then
            places := asked;
            resized := coalesce(right(f[13], 6) = 'resize', false);
            changed := true;
            freed := true;
            continue;
          elsif asked <> places and not resized then
            answer := 'limit s' || places;
          end if;
        end if;
        -- A waiter whose named owner came to hold meanwhile gets in, wherever it stands.
        exit when verb <> 'extend' or own.id is null or left(own.owner, 1) <> 'u' or cardinality(holding) = 0;
        token_held := aiodlock.token_of(own.owner, holding, now_ms);
        exit when token_held is null or (token_held < 0 and own.mode = 'x');
        moved := moved or own.deadline + own.delay < aiodlock.earliest_end(holding);
        mine := row(
          rid, own.mode, abs(token_held), own.deadline, own.length, own.delay, own.owner, own.client,
          own.hold, now_ms + own.hold, false, 0, own.note, own.description, own.lingers::integer
        );
        holding := holding || mine;
        keep_until := greatest(keep_until, mine.deadline + mine.delay, mine.hold_until);
        changed := true;
        durable := true;
        freed := true;
        delete from aiodlock.waiter w where w.id = rid;
        own := null;
      end loop;

      if mine.lingers = 1 and head_at > 0 then
        mine.lingers := 2;  -- it has got in past those who wait, as its owner holds
        for place in 1 .. cardinality(holding) loop
          if holding[place].id = rid then
            holding[place] := mine;
          end if;
        end loop;
      end if;
      if not mine.began and now_ms < mine.deadline
        and (verb = 'extend' and f[5] is not null or verb = 'acquire' and left(f[13], 6) = 'begins') then
        mine.began := true;
        for place in 1 .. cardinality(holding) loop
          if holding[place].id = rid then
            holding[place] := mine;
          end if;
        end loop;
        changed := true;
      end if;

      if verb = 'extend' then
        if now_ms < mine.deadline then
          answer := case when mine.lingers = 2 then 'recalled ' else 'held ' end || mine.token || ' '
                    || mine.deadline - now_ms;
        elsif own.id is not null then
          ends := case when own.arrival = head_at
                  then greatest(0, coalesce(aiodlock.earliest_end(holding), now_ms) - now_ms) else -1 end;
          answer := 'waiting ' || own.deadline - now_ms || ' ' || ends || ' ' || greatest(last_token, now_us);
        else
          answer := case when mine.id is not null then 'gone expired'
                    when cardinality(holding) > 0 then 'gone taken_over' else 'gone gone' end;
        end if;
      elsif verb = 'acquire' then
        token_held := case when cardinality(holding) > 1 or (holding[1]).owner = f[5]
                      then aiodlock.token_of(f[5], holding, now_ms) end;
        if head_at > 0 and own.id is null and (token_held is not null or f[9] = 'nowait') then
          select * into own from aiodlock.waiter w where w.id = rid and w.key = k and now_ms < w.deadline;
          if own.id is null then
            -- Overdue: it must not come back with the clock, beside what this message makes of the request.
            delete from aiodlock.waiter w where w.id = rid;
          end if;
        end if;
        if mine.id is not null and now_ms < mine.deadline then
          answer := case when mine.lingers = 2 then 'recalled ' else 'granted ' end || mine.token || ' '
                    || mine.deadline - now_ms;
        elsif mine.id is not null and now_ms < aiodlock.closed_until(mine) then
          answer := 'gone gone';
        elsif own.id is not null or answer is not null then
          null;
        elsif token_held < 0 and f[4] = 'x' then
          answer := 'deadlock';
        elsif token_held is not null
          or (head_at = 0 and (cardinality(holding) = 0 or (f[4] <> 'x' and aiodlock.fits(f[4], holding, places)))) then
          ends := coalesce(f[12]::bigint, 0);
          mine := row(
            rid, f[4], abs(token_held), now_ms + f[6]::bigint, f[6]::bigint, f[8]::bigint, f[5], caller,
            ends, now_ms + ends, coalesce(left(f[13], 6) = 'begins', false), 0, coalesce(f[10], ''),
            coalesce(f[11], ''), case when f[13] = 'linger' then case when head_at > 0 then 2 else 1 end else 0 end
          );
          if token_held is null then
            last_token := greatest(last_token + 1, now_us);
            mine.token := last_token;
            keep_until := greatest(keep_until, last_token / 1000 + 1 + retention);
          else
            moved := moved or aiodlock.closed_until(mine) < aiodlock.earliest_end(holding);
          end if;
          holding := holding || mine;
          keep_until := greatest(keep_until, mine.deadline + mine.delay, mine.hold_until);
          changed := true;
          answer := case when mine.lingers = 2 then 'recalled ' else 'granted ' end || mine.token || ' ' || f[6];
        else
          -- Each holder that lingers is told, once, that others want the name. Also one that is overdue: if the clock is set
          -- back, it may be live again.
          for place in 1 .. cardinality(holding) loop
            h := holding[place];
            if h.lingers = 1 then
              h.lingers := 2;
              holding[place] := h;
              changed := true;
              message := 'recall ' || h.id || ' ' || k;
              if h.client = caller then
                heard := coalesce(heard, '') || E'\n' || message;
              else
                perform aiodlock.tell(h.client, message);
              end if;
            end if;
          end loop;
        end if;
        if answer is not null or own.id is not null then
          null;
        elsif f[9] = 'nowait' then
          answer := 'busy';
        else
          -- The arrival is the time, or more if the clock was set back. So no number is used twice.
          loop
            insert into aiodlock.waiter as w
              select k, coalesce(max(l.arrival) + 1, now_us), rid, f[4], f[5], f[8]::bigint, caller,
                  now_ms + f[7]::bigint, f[7]::bigint, now_ms, coalesce(f[12]::bigint, 0), coalesce(f[10], ''),
                  coalesce(f[11], ''), coalesce(f[13] = 'linger', false)
                from aiodlock.waiter l where l.key = k and l.arrival >= now_us
              on conflict (id) do nothing returning w.* into own;
            exit when own.id is not null;
            -- The message was repeated. The request keeps its place, unless it is overdue.
            select * into own from aiodlock.waiter w where w.id = rid and w.key = k and now_ms < w.deadline;
            exit when own.id is not null;
            delete from aiodlock.waiter w where w.id = rid;
          end loop;
          if head_at = 0 then
            head_at := own.arrival;
            head_deadline := own.deadline;
            head_length := own.length;
            changed := true;
          end if;
        end if;
        if answer is null then
          ends := case when own.arrival = head_at
                  then greatest(0, coalesce(aiodlock.earliest_end(holding), now_ms) - now_ms) else -1 end;
          answer := 'waiting ' || least(own.deadline - now_ms, own.length) || ' ' || ends || ' '
                    || greatest(last_token, now_us);
        end if;
      end if;
      if verb <> 'acquire' and left(answer, 4) = 'gone'
        and exists (select from aiodlock.broken b where b.id = rid and now_ms < b.keep_until) then
        answer := 'gone broken';
      end if;

      -- A head that did not know when to look is told to, unless it will ask soon enough by itself.
      if moved and head_at > 0 then
        if head.id is null then
          select * into head from aiodlock.waiter w where w.key = k and w.arrival = head_at;
        end if;
        if head.id <> rid and aiodlock.earliest_end(holding) < head.deadline - head.length * 2 / 3 then
          message := 'look ' || head.id || ' ' || k;
          if head.client = caller then
            heard := coalesce(heard, '') || E'\n' || message;
          else
            perform aiodlock.tell(head.client, message);
          end if;
        end if;
      end if;
      if verb <> 'leave' then
        durable := true;
      end if;
      answers[number] := answer;
    end;
  end loop;

  if durable is null then
    -- Only releases: if a crash of the server forgets one, the lease ends at its deadline.
    done := set_config('synchronous_commit', 'off', true) is null;
  elsif current_setting('synchronous_standby_names') <> '' then
    perform aiodlock.wait_for_standby();
  end if;
  if length(heard) > 16000 then
    -- An answer must fit into what a connection takes without a reader: else a client that is paused would keep its
    -- names locked. Hints can be left out, and the client asks about all that it has.
    heard := E'\nlook * ' || k;
  end if;
  return array_to_string(answers, E'\n') || coalesce(heard, '');
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

-- As `turn`, for one message that acquires without lock-delay, hold and limit. If the name is free, one statement does
-- it. If one other request holds it alone, this one is queued without a look at the queue.
create function aiodlock.acquire_one(caller text, retention bigint, message text, k text, rid text, ttl bigint) returns text
@called@ as $$
declare
  now_us bigint := case when pg_advisory_xact_lock(1095323471, hashtext(k)) is null then 0 else aiodlock.clock_us() end;
  now_ms bigint;
  f text[];
  row_at tid;
  head_at bigint;
  look bigint;
  last_token bigint;
  arrived bigint;
  answer text;
begin
  update aiodlock.name n set
      token = now_us, keep_until = greatest(n.keep_until, now_us / 1000 + ttl, now_us / 1000 + 1 + retention),
      lone = rid, lone_until = now_us / 1000 + ttl, lone_length = ttl, lone_words = caller || E'\t' || message,
      writes = (n.writes + 1) % 32, version = n.version + (n.writes + 1) / 32
    where n.ctid = (select m.ctid from aiodlock.name m where m.key = k order by m.version desc limit 1)
      and n.lone = '' and n.token < now_us and (not @is_unlogged@ or ttl <= n.noted)
    returning 'granted ' || now_us || ' ' || ttl into answer;
  if answer is not null then
    return answer;
  end if;

  -- With a lone holder nothing is on record, and there are markers only if the clock was set back.
  f := string_to_array(message, E'\t');
  now_ms := now_us / 1000;
  select n.place, n.head, n.token, n.lone_until - now_ms into row_at, head_at, last_token, look
    from (select m.ctid as place, m.* from aiodlock.name m where m.key = k order by m.version desc limit 1) n
    where n.lone > '' and n.lone <> rid and now_ms < n.lone_until and n.lone_until <= now_ms + n.lone_length
      and split_part(n.lone_words, E'\t', 6) <> f[5] and right(n.lone_words, 7) <> E'\tlinger'
      and (f[4] = 'x' or split_part(n.lone_words, E'\t', 5) = 'x') and f[9] = 'wait'
      and (n.head = 0 or (now_ms < n.head_deadline and n.head_deadline <= now_ms + n.head_length))
      and n.marked_until <= now_ms and (not @is_unlogged@ or ttl <= n.noted)
      and current_setting('transaction_isolation') = 'read committed';
  if found then
    insert into aiodlock.waiter as w values (
        k, coalesce((select max(l.arrival) + 1 from aiodlock.waiter l where l.key = k and l.arrival >= now_us), now_us),
        rid, f[4], f[5], 0, caller, now_ms + f[7]::bigint, f[7]::bigint, now_ms, 0, coalesce(f[10], ''),
        coalesce(f[11], ''), coalesce(f[13] = 'linger', false)
      ) on conflict (id) do nothing returning w.arrival into arrived;
  end if;
  if arrived is null then
    return aiodlock.turn(caller, retention, message);
  end if;
  if head_at = 0 then
    update aiodlock.name n set
        head = arrived, head_deadline = now_ms + f[7]::bigint, head_length = f[7]::bigint,
        writes = (n.writes + 1) % 32, version = n.version + (n.writes + 1) / 32
      where n.ctid = row_at;
  end if;
  return 'waiting ' || f[7] || ' ' || case when head_at = 0 then look else -1 end || ' ' || greatest(last_token, now_us);
end $$;

-- As `turn`, for one message that leaves without a marker, by `ended` or `lost`; in front of it there may be one about
-- the same name as `acquire_one` takes. The only holder releases with one statement if nobody waits. If all that is
-- to be done is to grant to the first waiter, who excludes all others, two statements do it.
create function aiodlock.leave_one(caller text, retention bigint, messages text, k text, rid text) returns text
@called@ as $$
declare
  now_us bigint := case when pg_advisory_xact_lock(1095323471, hashtext(k)) is null then 0 else aiodlock.clock_us() end;
  now_ms bigint := now_us / 1000;
  f text[];                      -- the message in front
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
  done boolean;
begin
  if left(messages, 7) = 'acquire' then
    f := string_to_array(split_part(messages, E'\n', 1), E'\t');
  else
    update aiodlock.name n set lone = ''
      where n.ctid = (select m.ctid from aiodlock.name m where m.key = k order by m.version desc limit 1)
        and n.lone = rid and n.head = 0 and now_ms < n.lone_until
      returning 'released' into answer;
    if answer is not null then
      if not @is_unlogged@ then
        done := set_config('synchronous_commit', 'off', true) is null;  -- as in `turn`
      end if;
      return answer;
    end if;
  end if;

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
    return aiodlock.turn(caller, retention, messages);
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
  if its_client = caller then
    return answer || E'\ngranted ' || message;
  end if;
  done := aiodlock.tell(its_client, aiodlock.granted_word() || message) is null;
  return answer;
end $$;

-- As `turn`, for many messages. If each is about a name of its own, all free names are acquired with one statement,
-- all lone holders are extended with one, and all that release are released with one.
create function aiodlock.turn_many(caller text, retention bigint, messages text) returns text
@called@ set enable_hashjoin = off set enable_mergejoin = off set enable_material = off as $$
declare
  ops text[] := string_to_array(messages, E'\n');
  most integer := cardinality(ops);
  names integer;
  answers text[] := array_fill(null::text, array[most]);
  answered integer := 0;
  number integer;
  answer text;
  further text[];                -- what `turn` says to the other messages, and what is notified
  rest text := '';
  synchronous text;
  durable boolean := false;
  now_us bigint;
  now_ms bigint;
begin
  -- In the order of `turn`, so that no two calls wait for each other.
  select count(distinct locked.key) into names from (
    select u.key, pg_advisory_xact_lock(1095323471, u.hash) from (
      select n.key, hashtext(n.key) as hash from (select split_part(op, E'\t', 2) as key from unnest(ops) op) n
        order by 2, 1
    ) u
  ) locked;
  if names < most then
    return aiodlock.turn(caller, retention, messages);
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
    further := string_to_array(aiodlock.turn(caller, retention, rest), E'\n');
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
    synchronous := set_config('synchronous_commit', 'off', true);  -- as in `turn`
  end if;
  return array_to_string(answers, E'\n');
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

-- The keys that are held, waited for or on record, and begin so.
create function aiodlock.names(beginning text) returns setof text
language sql stable security definer set search_path = pg_catalog, pg_temp as $$
  select n.key from aiodlock.name n where starts_with(n.key, beginning) and (n.lone > '' or cardinality(n.holders) > 0)
  union
  select w.key from aiodlock.waiter w where starts_with(w.key, beginning)
  union
  select r.key from aiodlock.record r where starts_with(r.key, beginning)
$$;

revoke all on all functions in schema aiodlock from public;
-- Each client needs these, and they tell little. To use the schema is a right of its own.
grant select on aiodlock.history to public;
grant execute on function aiodlock.version, aiodlock.versions to public;
